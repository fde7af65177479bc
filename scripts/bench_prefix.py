"""Time to first token of requests that share a prefix: prefix cache against none, side by side.

The prefix is registered, then each request is asked alone of both engines, one after the other, and
last all of them at once. Between rounds the cache forgets what the requests published, so that the
prefix is what is found.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, Model, PrefixHandle, RequestOutput, SamplingParams
from paged_jax_scripts import cli, workload

ROUNDS = flags.DEFINE_integer("rounds", 3, "counted rounds, after one that compiles", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 32, "of the 32", lower_bound=1)
PREFIX_LEN = flags.DEFINE_integer("prefix_len", 256, "tokens that all share", lower_bound=1)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
cli.define_engine_flags()
flags.adopt_module_key_flags(cli)

Figures = dict[str, list[float]]


def load_requests(vocab_size: int) -> list[workload.Request]:
    """The requests with the beginning cut to ``prefix_len``, in a small vocabulary if need be."""
    shared = workload.load_shared_prefix()
    cut = max(len(shared.prefix_token_ids) - PREFIX_LEN.value, 0)
    return [
        workload.Request(
            [token % vocab_size for token in request.prompt_token_ids[cut:]], request.max_tokens
        )
        for request in shared.requests[: NUM_REQUESTS.value]
    ]


def make_engine(model: Model, *, is_cached: bool, requests: Sequence[workload.Request]) -> Engine:
    """An engine with room for all requests and the prefix."""
    size = flags.FLAGS.block_size
    most = sum(-(-(len(r.prompt_token_ids) + r.max_tokens) // size) for r in requests)
    num_blocks = 1 + most + -(-PREFIX_LEN.value // size)
    return cli.make_engine(model, num_blocks=num_blocks, prefix_cache=is_cached)


def first_token_seconds(outputs: Sequence[RequestOutput]) -> list[float]:
    """What each request waited for its first token."""
    return [(output.first_token_time or 0.0) - output.arrival_time for output in outputs]


def run_round(
    cold: Engine, cached: Engine, requests: Sequence[workload.Request], *, flip: bool
) -> Figures:
    """One round of both kinds of measurement; ``flip``: the cached engine goes first."""
    prefix = requests[0].prompt_token_ids[: PREFIX_LEN.value]
    cached.reset_prefix_cache()
    begin = time.perf_counter()
    handle = _register(cached, prefix)
    figures: Figures = {"register the prefix": [time.perf_counter() - begin]}
    engines = {"cold": cold, "cached": cached}
    order = list(engines)[:: -1 if flip else 1]
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    for request in requests:
        for name in order:
            outputs = engines[name].generate(request.prompt_token_ids, one_token)
            figures.setdefault(f"alone, {name}", []).extend(first_token_seconds(outputs))
            assert (outputs[0].num_cached_tokens >= len(prefix)) == (name == "cached")
    cached.unregister_prefix(handle)
    cached.reset_prefix_cache()
    handle = _register(cached, prefix)
    prompts = [request.prompt_token_ids for request in requests]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        for request in requests
    ]
    for name in order:
        begin = time.perf_counter()
        outputs = engines[name].generate(prompts, params)
        figures[f"all, {name}"] = [time.perf_counter() - begin]
        figures[f"first of all, {name}"] = [statistics.mean(first_token_seconds(outputs))]
    cached.unregister_prefix(handle)
    return figures


def _register(engine: Engine, prefix: list[int]) -> PrefixHandle:
    handle = engine.register_prefix(prefix)
    # Nothing was sampled, so the engine did not wait for the device.
    jax.block_until_ready(engine.executor.pool.blocks)
    return handle


def summarise(rounds: Sequence[Figures]) -> dict[str, float]:
    """Medians in seconds; ratios are medians and quartiles over pairs."""
    figures = {name: [v for one in rounds for v in one[name]] for name in rounds[0]}
    result = {f"{name}, seconds": statistics.median(values) for name, values in figures.items()}
    for kind in ("alone", "first of all", "all"):
        pairs = zip(figures[f"{kind}, cached"], figures[f"{kind}, cold"], strict=True)
        ratios = sorted(one / other for one, other in pairs)
        quarter = len(ratios) // 4
        result[f"{kind}, cached / cold"] = statistics.median(ratios)
        result[f"{kind}, cached / cold, lower quartile"] = ratios[quarter]
        result[f"{kind}, cached / cold, upper quartile"] = ratios[-1 - quarter]
    return result


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    model = cli.load_model()
    requests = load_requests(model.spec.vocab_size)
    cold, cached = (
        make_engine(model, is_cached=is_cached, requests=requests) for is_cached in (False, True)
    )
    console = Console()
    with console.status("one round to compile"):
        run_round(cold, cached, requests, flip=False)
    rounds = []
    for index in range(ROUNDS.value):
        with console.status(f"round {index + 1} of {ROUNDS.value}"):
            rounds.append(run_round(cold, cached, requests, flip=index % 2 == 1))
    result = summarise(rounds)
    lens = [len(request.prompt_token_ids) for request in requests]
    title = (
        f"{len(requests)} prompts of {min(lens)} to {max(lens)} tokens, {PREFIX_LEN.value} shared"
    )
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
