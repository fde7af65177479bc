import dataclasses

import pytest

from paged_jax.config import EngineConfig, ModelSpec, NgramSpeculation
from paged_jax.scheduling.preemption import PreemptionCosts

COSTS = PreemptionCosts(
    prefill_tokens_per_second=1, swap_bytes_per_second=1, swap_seconds_per_block=0
)
GOOD_SPEC = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 10,
    "max_position": 64,
}


def test_spec():
    assert ModelSpec(**GOOD_SPEC).kv_values_per_token == 2 * 2 * 2 * 8


@pytest.mark.parametrize("name", list(GOOD_SPEC))
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_spec_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer >= 1"):
        ModelSpec(**{**GOOD_SPEC, name: value})


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_spec_refuses_windows(window):
    with pytest.raises(ValueError, match=f"window={window!r} must be an integer >= 1"):
        ModelSpec(**GOOD_SPEC, window=window)
    assert ModelSpec(**GOOD_SPEC, window=1).window == 1


def test_spec_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads=4"):
        ModelSpec(**{**GOOD_SPEC, "num_kv_heads": 3})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be an integer >= 1"),
        ({"num_blocks": 1}, "num_blocks=1 must be an integer >= 2"),
        ({"pool_bytes": 0}, "pool_bytes=0"),
        ({"memory_fraction": 1.0}, "memory_fraction=1.0 must lie between 0 and 1"),
        ({"num_blocks": 4, "pool_bytes": 100}, "in one way, not by num_blocks and pool_bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"prefill_row_len": 0}, "prefill_row_len=0"),
        ({"prefill_chunk_len": 0}, "prefill_chunk_len=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"seed": -1}, "seed=-1"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4' must be"),
        ({"pool_head_dim": 0}, "pool_head_dim=0 must be an integer >= 1"),
        ({"preemption": "drop"}, "preemption='drop' must be one of 'recompute', 'swap', 'auto'"),
        ({"scheduling": "lifo"}, "scheduling='lifo' must be one of 'fcfs', 'priority'"),
        ({"preemption": "swap", "num_host_blocks": 1}, "num_host_blocks=1 must be an integer >= 2"),
        ({"preemption": "swap", "swap_bytes": 0}, "swap_bytes=0 must be an integer >= 1"),
        (
            {"preemption": "swap", "num_host_blocks": 9, "swap_bytes": 10**6},
            "size the host pool in one way, not by num_host_blocks and swap_bytes",
        ),
        (
            {"num_host_blocks": 9},
            "preemption='recompute' must be 'swap' or 'auto' with num_host_blocks",
        ),
        ({"swap_bytes": 9}, "preemption='recompute' must be 'swap' or 'auto' with swap_bytes"),
        (
            {"preemption": "auto", "preemption_costs": 5},
            "preemption_costs=5 must be PreemptionCosts or None",
        ),
        (
            {"preemption": "swap", "preemption_costs": COSTS},
            "preemption='swap' must be 'auto' with preemption_costs",
        ),
        ({"attention_backend": "cuda"}, "attention_backend='cuda' must be one of None, 'mosaic'"),
        ({"kernel_interpreter": 1}, "kernel_interpreter=1 must be True or False"),
        ({"speculation": 4}, "speculation=4 must be NgramSpeculation or None"),
        (
            {"kernel_interpreter": True, "attention_backend": "xla"},
            "attention_backend='xla' must be 'mosaic' or 'triton' with kernel_interpreter=True",
        ),
    ],
)
def test_engine_config_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**kwargs)


@pytest.mark.parametrize("name", ["num_draft_tokens", "min_ngram_len", "max_ngram_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_speculation_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer >= 1"):
        NgramSpeculation(**{name: value})


def test_speculation_refuses_lengths_out_of_order():
    with pytest.raises(ValueError, match="min_ngram_len=5 must be at most max_ngram_len=4"):
        NgramSpeculation(min_ngram_len=5)


def test_configs_are_frozen_and_hashable():
    config = EngineConfig()
    assert hash(config) == hash(EngineConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 3
