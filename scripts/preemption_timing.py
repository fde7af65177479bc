"""Times swapping and recomputing a sequence on the real engine, each alone."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from paged_jax import Engine, EngineConfig, Model, SamplingParams
from paged_jax.blocks.block_manager import BlockSwap


def measure(
    model: Model,
    *,
    block_size: int,
    num_tokens: int,
    runs: int,
    max_num_seqs: int,
    kv_dtype: str = "float32",
) -> dict[str, float]:
    """Seconds to swap a sequence out, in, and to recompute it; medians after a run to compile.

    Args:
      model: whose cache it is.
      block_size: token positions a block.
      num_tokens: of the sequence.
      runs: that count.
      max_num_seqs: of the engine.
      kv_dtype: of the pool.
    """
    num_blocks = -(-num_tokens // block_size)
    engine = Engine(
        model,
        config=EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks + 2,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            preemption="swap",
        ),
    )
    executor, host = engine.executor, engine.executor.host_pool
    assert host is not None
    prompt = np.random.default_rng(0).integers(0, model.spec.vocab_size, num_tokens).tolist()
    swaps = [BlockSwap(block, block) for block in range(1, num_blocks + 1)]
    seconds: dict[str, list[float]] = {"recompute": [], "out": [], "in": []}
    for _ in range(runs + 1):
        begin = time.perf_counter()
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        seconds["recompute"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        host.store(executor.pool, swaps)
        host.settle()
        seconds["out"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        executor.pool = jax.block_until_ready(host.load(executor.pool, swaps))
        seconds["in"].append(time.perf_counter() - begin)
    medians = {f"{name}_seconds": statistics.median(times[1:]) for name, times in seconds.items()}
    swap_seconds = medians["out_seconds"] + medians["in_seconds"]
    return medians | {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "mib": num_blocks * executor.pool.block_nbytes / 2**20,
        "swap_seconds": swap_seconds,
        "recompute_over_swap": medians["recompute_seconds"] / swap_seconds,
    }
