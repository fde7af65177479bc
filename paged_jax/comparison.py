"""The same greedy requests, paged and over a dense cache, in one run: equal, and at what cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from paged_jax.baselines.lockstep import Baseline, BaselineRun
from paged_jax.baselines.static_batch import run_static_batch
from paged_jax.config import EngineConfig, require
from paged_jax.engine import Engine
from paged_jax.model import Model
from paged_jax.sampling.params import SamplingParams

# Two float32 runs may part where the two best logits are closer than this (docs/design.md).
NEAR_TIE = 2e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the runs showed.

    Attributes:
      num_requests: requests.
      num_tokens: generated tokens of each run.
      num_equal: requests whose tokens are the same, paged and dense.
      near_ties: (request, step, top-two margin) where the others part.
      max_logit_difference: largest over all steps and tokens, same tokens fed to both.
      paged_bytes: memory of the blocks in use at the peak.
      dense_bytes: memory of the dense cache.
      dense_max_bytes: the same with the model's longest context reserved for every request.
      paged_seconds: wall time of the engine's second run (nothing left to compile).
      dense_seconds: wall time over the dense cache, compilation excluded.
    """

    num_requests: int
    num_tokens: int
    num_equal: int
    near_ties: tuple[tuple[int, int, float], ...]
    max_logit_difference: float
    paged_bytes: int
    dense_bytes: int
    dense_max_bytes: int
    paged_seconds: float
    dense_seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether tokens differ at most after a step whose two best logits nearly tie."""
        return all(margin < NEAR_TIE for _, _, margin in self.near_ties)


def compare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int] = 32,
    config: EngineConfig | None = None,
    engine: Engine | None = None,
    baseline: Baseline | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Decode greedily, paged and dense, in one run, and compare tokens, logits, memory and speed.

    The runs share weights and prompts: the engine (paged, continuous batching) and the baseline,
    both timed; then a paged pool in lockstep on the baseline's tokens, to compare the logits of
    every step.

    Args:
      model: what to run.
      prompts: token ids, a list a request.
      max_tokens: tokens to generate, for all or for each; end tokens are ignored.
      config: of the engine; None means ``EngineConfig()``.
      engine: one that exists already, instead of ``config``.
      baseline: the zoo's own decoding (``baselines.lockstep_baseline``); None means a static batch
        over ``DenseKVCache``, every row as long as the longest.
      report: told what comes next.

    Raises:
      ValueError: lengths do not match, both ``config`` and ``engine`` are given, or the baseline
        returned something else than was asked for.
    """
    require(config is None or engine is None, "config and engine must not both be given")
    if engine is None:
        engine = Engine(model, config=config or EngineConfig())
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    require(
        len(counts) == len(prompts) > 0,
        f"max_tokens has {len(counts)} entries, must have one a prompt ({len(prompts)} > 0)",
    )
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in counts]
    report("1 of 4: the engine, paged, to compile")
    engine.generate(prompts, params)
    report("2 of 4: the engine, paged, timed")
    begin = time.perf_counter()
    paged = [list(output.token_ids) for output in engine.generate(prompts, params)]
    paged_seconds = time.perf_counter() - begin
    dtype = engine.config.kv_dtype
    report("3 of 4: the dense cache, timed and keeping every step's logits")
    if baseline is None:
        dense = _static_baseline(model, prompts, counts, dtype)
    else:
        dense = baseline(prompts, counts)
        _check(dense, counts, model.spec.vocab_size)
    report("4 of 4: the same tokens over a paged pool, keeping every step's logits")
    lockstep = run_static_batch(
        model,
        prompts,
        counts,
        cache="paged",
        block_size=engine.config.block_size,
        dtype=dtype,
        forced=dense.token_ids,
        keep_logits=True,
    )
    ties = [
        (index, *_first_difference(tokens, dense, index))
        for index, tokens in enumerate(paged)
        if tokens != dense.token_ids[index]
    ]
    differences = [
        np.abs(np.stack([step[row] for step in lockstep.logits[:count]]) - dense.logits[row]).max()
        for row, count in enumerate(counts)
    ]
    block_bytes = engine.executor.pool.block_nbytes
    token_bytes = block_bytes // engine.config.block_size
    return Comparison(
        num_requests=len(prompts),
        num_tokens=sum(counts),
        num_equal=len(prompts) - len(ties),
        near_ties=tuple(ties),
        max_logit_difference=float(max(differences)),
        paged_bytes=engine.stats.peak_used_blocks * block_bytes,
        dense_bytes=dense.cache_nbytes,
        dense_max_bytes=len(prompts) * model.spec.max_position * token_bytes,
        paged_seconds=paged_seconds,
        dense_seconds=dense.seconds,
    )


def _static_baseline(
    model: Model, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], dtype: str
) -> BaselineRun:
    """A static batch over our own dense cache, timed without the logits' way to the host."""
    timed = run_static_batch(model, prompts, max_tokens, dtype=dtype)
    kept = run_static_batch(model, prompts, max_tokens, dtype=dtype, keep_logits=True)
    return BaselineRun(
        token_ids=kept.token_ids,
        logits=[
            np.stack([step[row] for step in kept.logits[:count]])
            for row, count in enumerate(max_tokens)
        ],
        cache_nbytes=kept.cache_nbytes,
        seconds=timed.prefill_seconds + timed.decode_seconds,
    )


def _check(run: BaselineRun, max_tokens: Sequence[int], vocab_size: int) -> None:
    found = [len(tokens) for tokens in run.token_ids]
    require(
        found == list(max_tokens),
        f"baseline: token_ids have the lengths {found}, must be {list(max_tokens)}",
    )
    shapes = [np.shape(logits) for logits in run.logits]
    expected = [(count, vocab_size) for count in max_tokens]
    require(shapes == expected, f"baseline: logits have the shapes {shapes}, must be {expected}")


def _first_difference(tokens: list[int], dense: BaselineRun, index: int) -> tuple[int, float]:
    """The step at which a request's tokens part, and the dense run's top-two margin there."""
    pairs = zip(tokens, dense.token_ids[index], strict=True)
    step = next(step for step, (left, right) in enumerate(pairs) if left != right)
    second, best = np.sort(dense.logits[index][step])[-2:]
    return step, float(best - second)
