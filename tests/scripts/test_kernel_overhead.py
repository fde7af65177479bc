"""Fig. 18 at toy size: every shape and size has its row, and the engine's work is the same."""

import pytest
from suites import hash_model
from suites.engine_runs import random_prompts

from paged_jax_scripts.experiments.kernel_overhead import (
    attention_rows,
    block_size_attention_rows,
    block_size_engine_rows,
)
from paged_jax_scripts.workload import Request
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES

TOY = HEAD_SHAPES["toy"]


def test_attention_has_a_row_a_shape():
    rows = attention_rows(heads=TOY, batches=(2,), contexts=(5, 8), block_size=4, pairs=3)
    assert [(row["batch"], row["context"]) for row in rows] == [(2, 5), (2, 8)]
    for row in rows:
        assert row["dense_form"] in ("scan", "unrolled", "jit a layer")
        assert min(row["paged_ms"], row["dense_ms"]) > 0
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_attention_by_block_size_is_relative_to_the_base():
    options = {"heads": TOY, "batch": 2, "context": 8, "pairs": 3}
    small, base = block_size_attention_rows(block_sizes=(1, 4), base=4, **options)
    assert (small["block_size"], base["block_size"]) == (1, 4)
    assert base["ratio"] == base["ratio_low"] == 1.0
    assert small["paged_ms"] > 0


@pytest.fixture(scope="module")
def engine_rows():
    requests = [Request(prompt, 3) for prompt in random_prompts(0, [5, 5, 5])]
    return block_size_engine_rows(
        hash_model.make_model(),
        requests,
        num_slots=32,
        max_num_seqs=3,
        block_sizes=(1, 16),
        runs=2,
    )


def test_small_blocks_waste_less_of_equal_pools(engine_rows):
    small, large = engine_rows
    assert (small["utilisation"], small["peak_rows"]) == (1.0, 3)
    assert large["utilisation"] < 0.7
    assert large["peak_rows"] == 2  # two blocks


def test_latencies_are_relative_to_the_base(engine_rows):
    small, large = engine_rows
    assert large["latency_ratio"] == 1.0
    assert small["latency_ratio"] > 0
    assert min(row["normalized_latency"] for row in engine_rows) > 0


def test_refusals():
    with pytest.raises(ValueError, match=r"base=16 must be one of block_sizes=\(1, 4\)"):
        block_size_attention_rows(block_sizes=(1, 4))
    with pytest.raises(ValueError, match="num_slots=40 must be a multiple of block size 16"):
        block_size_engine_rows(hash_model.make_model(), [], num_slots=40, block_sizes=(8, 16))
