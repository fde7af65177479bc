"""Fig. 18, executed here: attention through block tables against dense, and the block size.

The paper measured 20 to 26 % more attention latency than FasterTransformer's (Fig. 18a). Figures of
one call are measured in turns, so their ratios compare neighbours in time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from paged_jax import Engine, EngineConfig, Model
from paged_jax_scripts import workload
from paged_jax_scripts.attention_timing import (
    Shape,
    fastest_dense,
    paged_form,
    random_inputs,
    ratios_of,
    timed_forms,
)
from paged_jax_scripts.engine_comparison import Contender, run_in_turns
from pallas_kernels.paged_attention.arg_specs import HeadShape

OPT_13B = HeadShape(name="opt-13b", num_heads=40, num_kv_heads=40, head_dim=128)
BATCHES = (8, 32)
CONTEXTS = (64, 128, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Row = dict[str, float | int | str]


def attention_rows(
    *,
    heads: HeadShape = OPT_13B,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    block_size: int = 16,
    layers: int = 2,
    dtype: str = "float32",
    pairs: int = 9,
) -> list[Row]:
    """Fig. 18a: a write of one token and attention, a row a shape.

    Args:
      heads: of the model; the paper's is OPT-13B.
      batches: rows of the batch.
      contexts: tokens of context, the new one included.
      block_size: token positions a block.
      layers: layers a call; times are of one layer.
      dtype: of queries and cache.
      pairs: calls that are counted, of each form in turns.

    Returns:
      Times in ms (medians), and the ratio of paged to the fastest dense form with its quartiles.
    """
    rows: list[Row] = []
    for batch in batches:
        for context in contexts:
            shape = Shape(
                heads=heads,
                batch=batch,
                context=context,
                dtype=dtype,
                block_size=block_size,
                layers=layers,
            )
            # In so short contexts a temporary of fixed size is a large share of the cache.
            forms = timed_forms(shape, pairs=pairs, check=False)
            best = fastest_dense(forms)
            ratios = ratios_of(forms["paged"], forms[best])
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "paged_ms": _milliseconds(forms["paged"].seconds, layers),
                    "dense_ms": _milliseconds(forms[best].seconds, layers),
                    "dense_form": best,
                    **_quartiles(ratios),
                }
            )
    return rows


def block_size_attention_rows(
    *,
    heads: HeadShape = OPT_13B,
    batch: int = 8,
    context: int = 256,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    base: int = 16,
    layers: int = 2,
    dtype: str = "float32",
    pairs: int = 9,
) -> list[Row]:
    """The same call by block size, at one context: what small blocks cost (Fig. 18b's one side).

    Args:
      heads: of the model.
      batch: rows of the batch.
      context: tokens of context, the new one included.
      block_sizes: token positions a block; each makes a row.
      base: the block size that ratios are to, one of ``block_sizes``.
      layers: layers a call; times are of one layer.
      dtype: of queries and pool.
      pairs: calls that are counted, of each size in turns.

    Raises:
      ValueError: ``base`` is not among ``block_sizes``.
    """
    _require_base(base, block_sizes)
    shape = Shape(
        heads=heads, batch=batch, context=context, dtype=dtype, block_size=base, layers=layers
    )
    kv, x = random_inputs(shape)
    forms = {}
    for size in block_sizes:
        forms[size] = paged_form(dataclasses.replace(shape, block_size=size), kv)
        forms[size].step(x)
        forms[size].seconds.clear()
    for _ in range(pairs):
        for form in forms.values():
            form.step(x)
    return [
        {
            "block_size": size,
            "paged_ms": _milliseconds(form.seconds, layers),
            **_quartiles(ratios_of(form, forms[base])),
        }
        for size, form in forms.items()
    ]


def block_size_engine_rows(
    model: Model,
    requests: Sequence[workload.Request],
    *,
    num_slots: int,
    max_num_seqs: int = 32,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    base: int = 16,
    kv_dtype: str = "float32",
    runs: int = 3,
) -> list[Row]:
    """Fig. 18b end to end: the engine on the same requests and token slots, by block size.

    Args:
      model: what to run.
      requests: all there from the beginning.
      num_slots: token positions of each pool; a multiple of every block size, so that they are
        equally large.
      max_num_seqs: most sequences at once.
      block_sizes: token positions a block; each makes a row.
      base: the block size that ratios are to, one of ``block_sizes``.
      kv_dtype: of the pool.
      runs: counted runs of each size, in turns.

    Returns:
      Normalized latency (seconds an output token) and tokens/s (medians), its ratio to that of
      ``base`` as ``latency_ratio``, most rows at once, preemptions a run, and the share of the used
      blocks' slots that held tokens.

    Raises:
      ValueError: ``base`` is not among ``block_sizes``, or one does not divide ``num_slots``.
    """
    _require_base(base, block_sizes)
    for size in block_sizes:
        if num_slots % size:
            raise ValueError(f"num_slots={num_slots} must be a multiple of block size {size}")
    contenders = {}
    for size in block_sizes:
        config = EngineConfig(
            block_size=size,
            num_blocks=1 + num_slots // size,
            kv_dtype=kv_dtype,
            max_num_seqs=max_num_seqs,
            prefix_cache=False,  # the same prompts come again and again
        )
        contenders[size] = Contender(Engine(model, config=config))
    run_in_turns(contenders, requests, runs=runs)
    rows: list[Row] = []
    for size, contender in contenders.items():
        pairs = zip(contender.latencies, contenders[base].latencies, strict=True)
        num_tokens = sum(map(len, contender.token_ids))
        stats = contender.engine.stats
        rows.append(
            {
                "block_size": size,
                "normalized_latency": statistics.median(contender.latencies),
                "latency_ratio": statistics.median(own / other for own, other in pairs),
                "tokens_per_second": num_tokens / statistics.median(contender.seconds),
                "peak_rows": contender.peak_rows,
                "preemptions": stats.num_preemptions / runs,
                "utilisation": stats.block_utilisation,
            }
        )
    return rows


def _require_base(base: int, block_sizes: Sequence[int]) -> None:
    if base not in block_sizes:
        raise ValueError(f"base={base} must be one of block_sizes={tuple(block_sizes)}")


def _milliseconds(seconds: Sequence[float], layers: int) -> float:
    return statistics.median(seconds) * 1e3 / layers


def _quartiles(ratios: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(ratios, [25, 50, 75]).tolist()
    return {"ratio": median, "ratio_low": low, "ratio_high": high}
