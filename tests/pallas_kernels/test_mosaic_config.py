"""The model behind the Mosaic decode kernel's tiles, ring and grid."""

import dataclasses

import pytest
from suites.attention_cases import product

from pallas_kernels.devices import B200, H100, H200
from pallas_kernels.paged_attention import mosaic_config
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import (
    MosaicDecodeConfig,
    bytes_in_flight,
    decode_config,
    decode_geometry,
    pick_mosaic_decode_config,
    resident_ctas,
    smem_bytes,
)
from pallas_kernels.paged_attention.mosaic_decode import unsupported_decode

CALL = AttentionCall(
    num_rows=32,
    num_new=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=64,
    table_width=128,
    num_blocks=4096,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)
IN_FLIGHT = {H100: 32 * 1024, H200: 48 * 1024, B200: 48 * 1024}


def call(**changes) -> AttentionCall:
    return dataclasses.replace(CALL, **changes)


@pytest.mark.parametrize("device", [H100, H200, B200])
def test_every_call_fits_and_has_enough_in_flight(device):
    grid = product(
        num_kv_heads=(1, 8),
        group=(1, 4, 7, 16),
        num_new=(1, 4),
        head_dim=(64, 128, 192, 256),
        block_size=(8, 16, 32, 64, 128),
        kv_dtype=("bfloat16", "int8"),
    )
    taken = 0
    for shape in grid:
        group = shape.pop("group")
        c = call(num_heads=group * shape["num_kv_heads"], **shape)
        if unsupported_decode(c, device) is not None:
            continue
        taken += 1
        config = pick_mosaic_decode_config(c, device)
        resident = resident_ctas(c, config, device)
        assert config.num_ctas == device.num_sms * min(resident, 2), (c, config)
        assert smem_bytes(c, config) <= device.smem_per_block
        assert bytes_in_flight(c, config, device) >= IN_FLIGHT[device], (c, config)
        geometry = decode_geometry(c, config)
        assert geometry.num_groups * geometry.pack == c.num_kv_heads
        assert geometry.blocks_per_tile * geometry.block_rows == 64
    assert taken > len(grid) / 2


@pytest.mark.parametrize(
    ("changes", "pack", "stages"),
    [
        ({}, 1, 3),
        ({"block_size": 16}, 2, 3),
        ({"block_size": 16, "num_kv_heads": 1, "num_heads": 4}, 1, 3),
        ({"block_size": 16, "num_heads": 128}, 1, 3),  # 16 columns a head
        ({"block_size": 8, "kv_dtype": "int8"}, 4, 6),  # scales of 32 rows a copy
        ({"head_dim": 64}, 1, 6),
        ({"head_dim": 256}, 1, 3),
    ],
)
def test_chosen_tiles(changes, pack, stages):
    config = pick_mosaic_decode_config(call(**changes), H100)
    assert (config.pack, config.stages, config.mma) == (pack, stages, False)


def test_two_resident_blocks_at_the_common_shape():
    for block_size in (16, 64):
        c = call(block_size=block_size)
        assert resident_ctas(c, pick_mosaic_decode_config(c, H100), H100) == 2


def test_mma_where_wgmma_is_not():
    assert pick_mosaic_decode_config(CALL, B200).mma


@pytest.mark.parametrize("name", ["pack", "stages", "num_ctas"])
def test_refused(name):
    config = MosaicDecodeConfig(pack=1, stages=3, num_ctas=264, mma=False)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        dataclasses.replace(config, **{name: 0})


def test_a_measured_configuration_comes_first(monkeypatch):
    def measured(call, device, *, backend):
        assert call.q_dtype == "bfloat16"  # whatever q has: it is multiplied in the pool's
        return {"pack": 1, "stages": 4, "num_ctas": 264, "mma": True} if backend == "mosaic" else {}

    assert decode_config(CALL, H100) == pick_mosaic_decode_config(CALL, H100)
    monkeypatch.setattr(mosaic_config, "tuned_config", measured)
    config = decode_config(dataclasses.replace(CALL, q_dtype="float32"), H100)
    assert config == MosaicDecodeConfig(pack=1, stages=4, num_ctas=264, mma=True)
