"""The same prompts, paged and dense, in one run: whether they are equal, and what each costs.

The runs share weights and prompts: the engine (paged, continuous batching) and a static batch over
a dense cache, both timed; then both caches in lockstep on the same tokens, to compare every step's
logits at the same shapes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, Model, SamplingParams
from paged_jax.baselines import StaticRun, run_static_batch
from paged_jax_scripts import cli, workload

PROMPTS = flags.DEFINE_multi_string("prompt", [], "a prompt; none: built-in requests")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens a prompt", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", 8, "of the 32 built-in ones (8: about a minute on 2 cores)", lower_bound=1
)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
cli.define_engine_flags()
flags.adopt_module_key_flags(cli)

NEAR_TIE = 2e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What the runs showed.

    Attributes:
      num_requests: requests.
      num_tokens: generated tokens of each run.
      num_equal: requests whose tokens are the same, paged and dense.
      near_ties: (request, step, top-two margin) where the others part.
      max_logit_difference: largest over all steps and tokens, same tokens fed to both.
      paged_bytes: memory of the blocks in use at the peak.
      dense_bytes: memory of the dense cache, every row as long as the longest.
      dense_max_bytes: the same with the model's longest context reserved.
      paged_seconds: wall time of the engine's second run (nothing left to compile).
      dense_seconds: wall time of the dense static batch, compilation excluded.
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
    engine: Engine,
    requests: Sequence[workload.Request],
    *,
    report: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Do the runs and compare them; ``report`` is told what comes next."""
    prompts = [request.prompt_token_ids for request in requests]
    max_tokens = [request.max_tokens for request in requests]
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens
    ]
    report("1 of 5: the engine, paged, to compile")
    engine.generate(prompts, params)
    report("2 of 5: the engine, paged, timed")
    begin = time.perf_counter()
    paged = [list(output.token_ids) for output in engine.generate(prompts, params)]
    paged_seconds = time.perf_counter() - begin
    dtype = engine.config.kv_dtype
    report("3 of 5: a static batch, dense, timed")
    timed = run_static_batch(model, prompts, max_tokens, dtype=dtype)
    report("4 of 5: the same, keeping every step's logits")
    dense = run_static_batch(model, prompts, max_tokens, dtype=dtype, keep_logits=True)
    report("5 of 5: the same tokens over a paged pool, keeping every step's logits")
    lockstep = run_static_batch(
        model,
        prompts,
        max_tokens,
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
    block_bytes = engine.executor.pool.block_nbytes
    token_bytes = block_bytes // engine.config.block_size
    return Comparison(
        num_requests=len(prompts),
        num_tokens=sum(max_tokens),
        num_equal=len(prompts) - len(ties),
        near_ties=tuple(ties),
        max_logit_difference=_largest_difference(dense, lockstep, max_tokens),
        paged_bytes=engine.stats.peak_used_blocks * block_bytes,
        dense_bytes=dense.cache_nbytes,
        dense_max_bytes=len(prompts) * model.spec.max_position * token_bytes,
        paged_seconds=paged_seconds,
        dense_seconds=timed.prefill_seconds + timed.decode_seconds,
    )


def _first_difference(tokens: list[int], dense: StaticRun, index: int) -> tuple[int, float]:
    """The step at which a request's tokens part, and the dense run's top-two margin there."""
    pairs = zip(tokens, dense.token_ids[index], strict=True)
    step = next(step for step, (left, right) in enumerate(pairs) if left != right)
    return step, float(dense.margins[index, step])


def _largest_difference(one: StaticRun, other: StaticRun, max_tokens: Sequence[int]) -> float:
    counts = np.array(max_tokens)
    largest = 0.0
    for step, (left, right) in enumerate(zip(one.logits, other.logits, strict=True)):
        live = counts > step  # rows that have ended feed tokens that nobody asked for
        largest = max(largest, float(np.abs(left[live] - right[live]).max()))
    return largest


def print_comparison(console: Console, result: Comparison) -> None:
    """Print a table with paged and dense side by side."""
    table = Table(title="paged against dense, same prompts, same run", title_justify="left")
    for heading in ("", "paged", "dense"):
        table.add_column(heading)

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:,.1f} MiB"

    table.add_row("requests", str(result.num_requests), str(result.num_requests))
    table.add_row("KV memory", f"{mib(result.paged_bytes)} (peak)", mib(result.dense_bytes))
    table.add_row("  longest context reserved", "", mib(result.dense_max_bytes))
    table.add_row("seconds", f"{result.paged_seconds:.2f}", f"{result.dense_seconds:.2f}")
    rates = [result.num_tokens / s for s in (result.paged_seconds, result.dense_seconds)]
    table.add_row("wanted tokens/s", *(f"{rate:.1f}" for rate in rates))
    console.print(table)
    console.print(
        f"Equal tokens: {result.num_equal} of {result.num_requests} requests. "
        f"Largest logit difference: {result.max_logit_difference:.2e}. "
        f"Dense holds {result.dense_bytes / result.paged_bytes:.1f} times the paged memory "
        f"({result.dense_max_bytes / result.paged_bytes:.0f} times with the longest context), "
        f"and takes {result.dense_seconds / result.paged_seconds:.2f} times as long."
    )
    for index, step, margin in result.near_ties:
        verdict = "a near tie" if margin < NEAR_TIE else "NOT a near tie"
        console.print(
            f"Request {index} parts at step {step}: top-two margin {margin:.2e}, {verdict}."
        )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _requests(model: Model) -> list[workload.Request]:
    if not PROMPTS.value:
        return workload.load()[: NUM_REQUESTS.value]
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, so --prompt cannot be used")
    encode = model.tokenizer.encode
    return [workload.Request(encode(prompt), MAX_TOKENS.value) for prompt in PROMPTS.value]


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags; exit 1 when tokens differ other than after a near tie."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}: prompts go into --prompt")
    console = Console()
    model = cli.load_model()
    engine = cli.make_engine(model)
    result = compare(model, engine, _requests(model), report=_report)
    print_comparison(console, result)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(result), file, indent=2)
    if engine.config.kv_dtype == "float32" and not result.is_equal:
        sys.exit(1)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
