import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.devices import H100
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.roofline import (
    Cost,
    attention_cost,
    block_copy_cost,
    kv_bytes_per_token,
    kv_write_cost,
)
from scripts.gpu import floors

CALL = AttentionCall(
    num_rows=2,
    num_new=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    table_width=8,
    num_blocks=40,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)


def test_decode_counts_by_hand():
    cost = attention_cost(CALL, [17, 128], num_parts=3)
    per_token = 2 * 2 * 64 * 2
    assert cost.kv_bytes == (17 + 128) * per_token
    assert cost.kv_block_bytes == (32 + 128) * per_token
    assert cost.io_bytes == 2 * (2 * 8 * 64 * 2) + 4 * (2 + 8) + 4 * 4
    assert cost.partial_bytes == 2 * 3 * (64 + 2) * 4
    assert cost.operations == 4 * (17 + 128) * 8 * 64
    assert cost.least_bytes == cost.kv_bytes + cost.io_bytes
    assert cost.total_bytes == cost.kv_block_bytes + cost.io_bytes + cost.partial_bytes


def test_empty_rows_cost_no_keys():
    cost = attention_cost(CALL, [0, 0])
    assert cost.kv_bytes == cost.kv_block_bytes == cost.operations == 0


@pytest.mark.parametrize("window", [None, 1, 5, 16, 33, 1000])
@pytest.mark.parametrize(("kv_len", "q_len"), [(40, 1), (40, 40), (40, 7), (100, 33)])
def test_window_and_causal_pairs_against_a_mask(window, kv_len, q_len):
    call = dataclasses.replace(CALL, num_rows=1, num_new=64)
    cost = attention_cost(call, [kv_len], [q_len], window=window)
    q_pos = kv_len - q_len + np.arange(q_len)[:, None]
    k_pos = np.arange(kv_len)
    mask = (k_pos <= q_pos) & (k_pos > q_pos - (window or kv_len))
    assert cost.operations == 4 * mask.sum() * 8 * 64
    seen = np.flatnonzero(mask.any(0))
    assert cost.kv_bytes == len(seen) * kv_bytes_per_token(call)
    assert cost.kv_block_bytes == len(set(seen // 16)) * 16 * kv_bytes_per_token(call)


def test_prefill_takes_the_whole_of_t_by_default():
    call = dataclasses.replace(CALL, num_new=32)
    assert attention_cost(call, [20, 50]) == attention_cost(call, [20, 50], [20, 32])


def test_eight_bit_pools_read_their_scales():
    call = dataclasses.replace(CALL, kv_dtype="int8")
    assert kv_bytes_per_token(call) == 2 * 2 * (64 + 4)


def test_write_and_copy():
    written = kv_write_cost(CALL, 5)
    assert written.kv_bytes == 5 * kv_bytes_per_token(CALL)
    assert written.io_bytes == 5 * kv_bytes_per_token(CALL) + 4 * 5
    assert kv_write_cost(CALL, 5, new_dtype="float32").io_bytes > written.io_bytes
    copied = block_copy_cost(CALL, 3, num_layers=4)
    assert copied.kv_bytes == 2 * 3 * 4 * 16 * kv_bytes_per_token(CALL)


def test_floor_is_the_larger_of_memory_and_operations():
    memory = Cost(kv_bytes=10**9, kv_block_bytes=0, io_bytes=0)
    assert memory.floor_seconds(H100) == pytest.approx(1e9 / 3.35e12)
    matmul = dataclasses.replace(memory, operations=10**15)
    assert matmul.floor_seconds(H100) == pytest.approx(1e15 / 989e12)


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="kv_lens has 1 rows; must be 2"):
        attention_cost(CALL, [3])
    with pytest.raises(ValueError, match="q_lens has 3 rows; must be 2"):
        attention_cost(CALL, [3, 3], [1, 1, 1])
    with pytest.raises(ValueError, match=r"q_len is 4; must be within 0\.\.kv_len=3"):
        attention_cost(CALL, [3, 3], [4, 1])


def test_floors_in_the_docs_are_current():
    page = (Path(floors.__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert page == floors.updated(page), "python -m paged_jax_scripts.gpu.floors docs/kernels.md"


def test_a_page_without_markers():
    with pytest.raises(ValueError, match="the page must have the lines"):
        floors.updated("no table here")
