"""How the Pallas Triton kernel's tiles are chosen: a pure function of shapes and device facts."""

import dataclasses
import itertools

import pytest

from pallas_kernels.devices import A10, A100, B200, H100, H200, KNOWN_GPUS
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.triton_config import (
    TritonConfig,
    bytes_in_flight,
    num_resident,
    pick_triton_config,
)

LLAMA = AttentionCall(
    num_rows=8,
    num_new=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    table_width=128,
    num_blocks=2048,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)
DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "float32")]
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def pick(device=H100, **settings) -> TritonConfig:
    return pick_triton_config(dataclasses.replace(LLAMA, **settings), device)


def test_a_decode_on_h100():
    assert pick() == TritonConfig(rows=16, tokens=128, splits=2, num_warps=8, num_stages=7)


@pytest.mark.parametrize(("num_new", "num_heads", "rows"), [(1, 8, 16), (1, 56, 16), (4, 64, 32),
                                                          (8, 64, 64), (8, 512, 128)])  # fmt: skip
def test_all_queries_of_a_group_share_a_tile(num_new, num_heads, rows):
    assert pick(num_new=num_new, num_heads=num_heads).rows == rows


def test_splits_fill_the_device_and_no_more():
    assert pick(num_rows=1).splits == 8  # a table of 2048 positions is 16 tiles, 2 a split
    assert pick(num_rows=1, table_width=2048).splits == 16  # 8 heads, 132 multiprocessors
    assert pick(num_rows=64).splits == 1
    assert pick(num_rows=8, num_new=512).splits == 1


@pytest.mark.parametrize("device", KNOWN_GPUS.values(), ids=KNOWN_GPUS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_choice_fits_its_device(device, dtypes, head_dim):
    q_dtype, kv_dtype = dtypes
    for num_new, num_heads in itertools.product((1, 8, 512), (8, 56, 512)):
        call = dataclasses.replace(
            LLAMA,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            num_new=num_new,
            num_heads=num_heads,
        )
        assert num_resident(call, device, pick_triton_config(call, device)) >= 1


@pytest.mark.parametrize("device", [A100, H100, H200, B200], ids=lambda device: device.kind)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_keeps_enough_bytes_in_flight(device, dtypes, head_dim):
    q_dtype, kv_dtype = dtypes
    call = dataclasses.replace(LLAMA, head_dim=head_dim, q_dtype=q_dtype, kv_dtype=kv_dtype)
    least = 48 if device in (H200, B200) else 32
    config = pick_triton_config(call, device)
    assert bytes_in_flight(call, device, config) >= least * 1024


def test_little_shared_memory_takes_shorter_tiles():
    assert pick(A10).tokens < pick(H100).tokens


def test_a_config_that_the_kernel_cannot_run_is_refused():
    good = TritonConfig(rows=16, tokens=64, splits=1, num_warps=4, num_stages=3)
    for name, value in [("rows", 8), ("rows", 24), ("tokens", 8), ("num_warps", 3)]:
        with pytest.raises(ValueError, match=rf"{name} is {value}; must be a power of two"):
            dataclasses.replace(good, **{name: value})
    for name in ("splits", "num_stages"):
        with pytest.raises(ValueError, match=f"{name} is 0; must be at least 1"):
            dataclasses.replace(good, **{name: 0})
