"""Requests as they came, on this machine's engine or on a simulated server (docs/replay.md).

python scripts/replay_trace.py --trace=azure_conv.csv --max_requests=50 --time_scale=0.1
python scripts/replay_trace.py --mode=simulated --server=opt-13b --dataset=sharegpt --rate=2
python scripts/replay_trace.py --mode=simulated --server=llama-3-8b-h100 --trace=mooncake.jsonl
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from absl import flags
from rich.console import Console

from paged_jax import count_compilations
from paged_jax.simulation.arrivals import poisson, scaled
from paged_jax.simulation.fitting import FittedRequests, fit_to_context
from paged_jax.simulation.lengths import DATASETS, draw_requests
from paged_jax.simulation.machines import SERVERS
from paged_jax.simulation.simulator import Policy, SimulationSettings, simulate
from paged_jax.simulation.traces import TraceRequest, find_tokens_per_id, read_trace
from paged_jax_scripts import cli
from paged_jax_scripts.replay_figures import (
    ReplayFigures,
    describe,
    make_figures,
    table_rows,
)
from paged_jax_scripts.replaying import EngineReplay, PromptMaker, warm_up

_POLICIES = ("paged", "orca_max", "orca_pow2", "orca_oracle", "static")
_TRACE = flags.DEFINE_string("trace", None, "CSV or JSON lines, or those as .gz")
_DATASET = flags.DEFINE_enum("dataset", None, [*DATASETS], "instead: lengths like the paper's")
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 1000, "of a dataset", lower_bound=1)
_RATE = flags.DEFINE_float(
    "rate", None, "requests a second, at random (Poisson); None: the trace's own arrivals"
)
_TIME_SCALE = flags.DEFINE_float("time_scale", 1.0, "2: requests come twice as fast")
_DIVIDE_BY = flags.DEFINE_integer(
    "divide_by", 1, "lengths of a trace become that many times shorter", lower_bound=1
)
_MAX_REQUESTS = flags.DEFINE_integer("max_requests", None, "of a trace, the first", lower_bound=1)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", None, "requests that come later are left out; real: the run ends then, too"
)
_CLIP = flags.DEFINE_bool("clip", False, "cut requests that are too long; False: leave them out")
_MODE = flags.DEFINE_enum("mode", "real", ["real", "simulated"], "on this machine, or a server")
_SERVER = flags.DEFINE_enum("server", None, [*SERVERS], "simulated: the model and its GPUs")
_POLICY = flags.DEFINE_enum("policy", "paged", _POLICIES, "how memory is given out")
_SEED = flags.DEFINE_integer("seed", 0, "of arrivals, lengths and prompts", lower_bound=0)
_EVENT_LOG = flags.DEFINE_string("event_log", None, "write the event record there")
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")
cli.define_engine_flags()
flags.adopt_module_key_flags(cli)

_SIMULATED_FLAGS = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")


def _check_flags() -> None:
    if (_TRACE.value is None) == (_DATASET.value is None):
        raise ValueError(
            f"trace={_TRACE.value} and dataset={_DATASET.value}: exactly one must be given"
        )
    if _DATASET.value and _RATE.value is None:
        raise ValueError(f"rate=None must be given with dataset={_DATASET.value}")
    if _MAX_SECONDS.value is not None and not _MAX_SECONDS.value > 0:
        raise ValueError(f"max_seconds={_MAX_SECONDS.value} must be > 0")
    if _MODE.value == "simulated" and _SERVER.value is None:
        raise ValueError(f"server=None must be one of {', '.join(SERVERS)} to be simulated")
    if _MODE.value == "real" and _POLICY.value == "static":
        raise ValueError("policy=static must be run with mode=simulated: no engine does that")
    unused = {
        "a trace": _TRACE.value is not None and ("num_requests",),
        "a dataset": _DATASET.value is not None and ("max_requests", "divide_by"),
        "mode=real": _MODE.value == "real" and ("server",),
        "mode=simulated": _MODE.value == "simulated" and ("model", "dtype", "speculate"),
    }
    for case, names in unused.items():
        for name in names or ():
            if flags.FLAGS[name].present:
                raise ValueError(f"{name}={flags.FLAGS[name].value} must not be given with {case}")


def _load_requests() -> tuple[str, list[TraceRequest]]:
    """The workload's name and its requests."""
    if _TRACE.value is not None:
        name = Path(_TRACE.value).name
        requests = read_trace(
            _TRACE.value, max_requests=_MAX_REQUESTS.value, divide_by=_DIVIDE_BY.value
        )
    else:
        assert _DATASET.value is not None, "checked before"
        name = _DATASET.value
        # Enough that the means are the dataset's; the first ones of them are a fair sample.
        num_requests, seed = _NUM_REQUESTS.value, _SEED.value
        drawn = draw_requests(DATASETS[name], max(1000, 2 * num_requests), seed=seed)
        requests = drawn[:num_requests]
    if _RATE.value is not None:
        requests = poisson(requests, rate=_RATE.value, seed=_SEED.value)
    requests = scaled(requests, time_scale=_TIME_SCALE.value)
    most = _MAX_SECONDS.value
    kept = [request for request in requests if most is None or request.arrival <= most]
    if not kept:
        raise ValueError(f"max_seconds={most} must not be before the first request comes")
    return name, kept


def _fit(
    console: Console, requests: Sequence[TraceRequest], *, max_model_len: int, ids: int | None
) -> FittedRequests:
    fitted = fit_to_context(
        requests, max_model_len=max_model_len, clip=_CLIP.value, tokens_per_id=ids
    )
    context = f"longer than the context of {max_model_len:,} tokens"
    if fitted.num_left_out:
        console.print(f"{fitted.num_left_out:,} are {context}: left out (--clip cuts them)")
    if fitted.num_clipped:
        console.print(f"{fitted.num_clipped:,} are {context}: cut")
    return fitted


def _has_prefix_cache() -> bool:
    """What the flag says if it was given; contiguous policies share nothing."""
    flag = flags.FLAGS["prefix_cache"]
    return bool(flag.value and (flag.present or _POLICY.value == "paged"))


def _run_simulated(
    console: Console, requests: Sequence[TraceRequest], ids: int | None
) -> tuple[FittedRequests, ReplayFigures]:
    assert _SERVER.value is not None, "checked before"
    server = SERVERS[_SERVER.value]
    chosen: dict[str, Any] = {
        name: flags.FLAGS[name].value for name in _SIMULATED_FLAGS if flags.FLAGS[name].present
    }
    settings = SimulationSettings(
        **chosen,
        max_model_len=flags.FLAGS.max_model_len,
        prefix_cache=_has_prefix_cache() and ids is not None,
        tokens_per_id=ids or 16,
        event_log=_EVENT_LOG.value,
    )
    longest = settings.resolve_max_model_len(server)
    fitted = _fit(console, requests, max_model_len=longest, ids=ids)
    with console.status(f"simulating {len(fitted.requests):,} requests"):
        result = simulate(
            server, fitted.requests, policy=cast(Policy, _POLICY.value), settings=settings
        )
    return fitted, make_figures(result.records, gaps=result.gaps, meter=result.meter)


def _run_real(
    console: Console, requests: Sequence[TraceRequest], ids: int | None
) -> tuple[FittedRequests, ReplayFigures]:
    model = cli.load_model()
    settings: dict[str, Any] = {
        "reservation": _POLICY.value,
        "prefix_cache": _has_prefix_cache(),
    }
    with console.status("compiling"):
        warm_up(cli.make_engine(model, **settings), seed=_SEED.value)
    engine = cli.make_engine(model, event_log=_EVENT_LOG.value, **settings)
    fitted = _fit(console, requests, max_model_len=engine.max_model_len, ids=ids)
    prompts = PromptMaker(vocab_size=model.spec.vocab_size, tokens_per_id=ids, seed=_SEED.value)
    replay = EngineReplay(
        engine, fitted.requests, make_prompt=prompts.make, max_seconds=_MAX_SECONDS.value
    )
    with console.status("") as status, count_compilations() as compiled:

        def show() -> None:
            status.update(
                f"{len(replay.records):,} of {len(fitted.requests):,} ended, "
                f"{engine.scheduler.num_running} run, {engine.scheduler.num_waiting} wait"
            )

        replay.run(on_step=show)
    if replay.refused:
        console.print(f"refused, the first of them because {replay.refused[0].reason}")
    if engine.event_log is not None:
        engine.event_log.close()
    if not replay.records:
        raise ValueError("no request ended: what is printed is of those that do")
    figures = make_figures(
        replay.records,
        gaps=replay.gaps,
        meter=replay.meter,
        num_unfinished=replay.num_added - len(replay.records),
        num_refused=len(replay.refused),
        num_compilations=compiled.count,
    )
    return fitted, figures


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    _check_flags()
    console = Console()
    name, requests = _load_requests()
    console.print(describe(name, requests))
    run = _run_simulated if _MODE.value == "simulated" else _run_real
    begin = time.perf_counter()
    fitted, figures = run(console, requests, find_tokens_per_id(requests))
    seconds = time.perf_counter() - begin
    where = _SERVER.value or cli.MODEL.value
    title = f"{where}, {_POLICY.value}, {_MODE.value} (took {seconds:.1f} s)"
    cli.print_figures(console, table_rows(figures), title=title)
    if _JSON.value:
        record = {
            "workload": name, "where": where, "policy": _POLICY.value, "mode": _MODE.value,
            "rate": _RATE.value, "time_scale": _TIME_SCALE.value, "divide_by": _DIVIDE_BY.value,
            "num_left_out": fitted.num_left_out, "num_clipped": fitted.num_clipped,
            **dataclasses.asdict(figures),
        }  # fmt: skip
        Path(_JSON.value).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    cli.run_program(main)
