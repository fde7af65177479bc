"""The tuner: a grid of configurations a shape, a timer, and the table of what was fastest."""

import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from pallas_kernels.devices import H100, Device, current_device
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import (
    MosaicDecodeConfig,
    pick_mosaic_decode_config,
)
from pallas_kernels.paged_attention.mosaic_config import smem_bytes as mosaic_smem_bytes
from pallas_kernels.paged_attention.triton_config import (
    TritonConfig,
    num_resident,
    pick_triton_config,
)
from pallas_kernels.paged_attention.tuned import EXACT_FIELDS, SCHEMA, device_name, num_tokens

type Config = TritonConfig | MosaicDecodeConfig
# Seconds a call of each configuration, infinity where it does not compile or run.
type Timer = Callable[[AttentionCall, str, Sequence[Config]], list[float]]
ROUNDS = 5


def default_config(call: AttentionCall, backend: str, device: Device) -> Config:
    """What the backend's heuristic picks."""
    if backend == "triton":
        return pick_triton_config(call, device)
    if backend == "mosaic":
        return pick_mosaic_decode_config(call, device)
    raise ValueError(f"backend is {backend!r}; must be 'mosaic' or 'triton'")


def config_grid(call: AttentionCall, backend: str, device: Device) -> list[Config]:
    """The heuristic's configuration first, then its neighbours that fit the device.

    Triton: tiles of 32, 64 and 128 positions, 4 and 8 warps, 3 to 5 stages, and the heuristic's
    splits, halved and doubled. Mosaic: 1, 2 and 4 heads a tile, 2 to 6 stages, one to three
    thread blocks a multiprocessor, and both tensor core operations where the device has both.

    Raises:
        ValueError: a backend without configurations.
    """
    default = default_config(call, backend, device)
    if isinstance(default, TritonConfig):
        around = sorted({max(1, default.splits // 2), default.splits, 2 * default.splits})
        configs: list[Config] = [
            dataclasses.replace(
                default, tokens=tokens, num_warps=warps, num_stages=stages, splits=splits
            )
            for tokens in (32, 64, 128)
            for warps in (4, 8)
            for stages in (3, 4, 5)
            for splits in around
        ]
        fitting = [
            c for c in configs if isinstance(c, TritonConfig) and num_resident(call, device, c)
        ]
        return [default, *(c for c in fitting if c != default)]
    is_hopper = device.compute_capability is not None and device.compute_capability[0] == 9
    return [
        default,
        *(
            config
            for pack in (1, 2, 4)
            if call.num_kv_heads % pack == 0 and pack * call.block_size <= 64
            for stages in range(2, 7)
            for ctas in (1, 2, 3)
            for mma in ((False, True) if is_hopper else (default.mma,))
            for config in [
                MosaicDecodeConfig(
                    pack=pack, stages=stages, num_ctas=ctas * device.num_sms, mma=mma
                )
            ]
            if config != default and mosaic_smem_bytes(call, config) <= device.smem_per_block
        ),
    ]


def tune(
    call: AttentionCall,
    backend: str,
    configs: Sequence[Config],
    timer: Timer,
    *,
    least_gain: float = 0.03,
) -> dict[str, Any] | None:
    """An entry of the table, or None where not even the first configuration runs.

    Args:
        call: the shape.
        backend: whose configurations.
        configs: the heuristic's first.
        timer: measures them.
        least_gain: share of the heuristic's time that another must save to be taken.
    """
    seconds = timer(call, backend, configs)
    best = min(range(len(configs)), key=lambda i: seconds[i])
    if not math.isfinite(seconds[best]):
        return None
    if seconds[best] > seconds[0] * (1 - least_gain):
        best = 0
    return {
        "backend": backend,
        **{field: getattr(call, field) for field in EXACT_FIELDS},
        "num_rows": call.num_rows,
        "num_tokens": num_tokens(call),
        "config": dataclasses.asdict(configs[best]),
        "seconds": seconds[best],
        "default_seconds": seconds[0] if math.isfinite(seconds[0]) else None,
        "num_tried": len(configs),
        "num_failed": sum(not math.isfinite(s) for s in seconds),
    }


def time_on_device(
    call: AttentionCall, backend: str, configs: Sequence[Config], *, interpret: bool = False
) -> list[float]:
    """Medians of interleaved rounds, by `contenders.chain` as in `gpu_check`."""
    import jax

    from .contenders import Data, chain, pool_view
    from .speed import num_sets, num_turns
    from .worker import compile_all, lower

    device = current_device()
    sets = 1 if interpret else num_sets(call, device)
    turns = 1 if interpret else num_turns(call, device, sets)
    width = call.table_width
    call = dataclasses.replace(call, num_blocks=sets * call.num_rows * width + 1)
    data = Data.spec(call, sets)
    lowered: dict[int, Any] = {}
    for index, config in enumerate(configs):
        attend = _attend(data, backend, config, interpret)
        try:
            program = chain(attend, turns=turns, sets=sets)
            lowered[index] = lower(program, data.q, pool_view(data))
        except Exception as error:
            print(f"    {config}: {type(error).__name__}: {str(error)[:200]}")
    threads = min(12, os.cpu_count() or 1)
    programs = compile_all([{str(i): x for i, x in lowered.items()}], threads=threads)[0]
    made = data.make()
    runs, seconds = {}, [math.inf] * len(configs)
    for name, program in programs.items():
        run = functools.partial(_run, program, made.q, pool_view(made))
        try:
            run()  # the first, not timed
            runs[int(name)] = run
        except Exception as error:
            print(f"    {configs[int(name)]}: {type(error).__name__}: {str(error)[:200]}")
    times: dict[int, list[float]] = {index: [] for index in runs}
    for _ in range(1 if interpret else ROUNDS):
        for index, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[index].append((time.perf_counter() - start) / (sets * turns))
    for index, values in times.items():
        seconds[index] = statistics.median(values)
    return seconds


def _run(program: Any, *args: Any) -> Any:
    if isinstance(program, Exception):
        raise program
    return program(*args).block_until_ready()


def _attend(data: Any, backend: str, config: Config, interpret: bool) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.paged_attention.mosaic_decode import paged_attention_mosaic_decode
    from pallas_kernels.paged_attention.triton import paged_attention_triton

    call = data.call
    options: dict[str, Any] = {"window": None, "soft_cap": None, "sinks": None, "kv_scales": None}
    options |= {"scale": call.head_dim**-0.5, "config": config, "interpret": interpret}
    run: Any = paged_attention_mosaic_decode
    if backend == "triton":
        run, options["score_fn"] = paged_attention_triton, None

    def attend(q: Any, view: Any, index: Any) -> Any:
        lens = jnp.full(call.num_rows, data.num_tokens, jnp.int32)
        ones = jnp.ones(call.num_rows, jnp.int32)
        return run(q, view["big"], view["tables"][index], lens, ones, **options)[0]

    return attend


def tune_all(
    calls: Sequence[AttentionCall],
    backends: Sequence[str],
    device: Device,
    timer: Timer,
    *,
    least_gain: float,
    budget_s: float,
    max_configs: int | None = None,
) -> list[dict[str, Any]]:
    """The entries of every shape and backend that the time allows; prints each."""
    entries, start = [], time.monotonic()
    for call in calls:
        for backend in backends:
            if time.monotonic() - start > budget_s:
                print("time budget: the rest is not tuned")
                return entries
            configs = config_grid(call, backend, device)[:max_configs]
            entry = tune(call, backend, configs, timer, least_gain=least_gain)
            if entry is not None:
                entries.append(entry)
            print(f"B {call.num_rows} {num_tokens(call)} {backend}: {entry}", flush=True)
    return entries


def _calls() -> list[AttentionCall]:
    from .speed import Shape

    if flags.FLAGS.cpu_rehearsal:
        heads = dataclasses.replace(HEAD_SHAPES["toy"], head_dim=64, num_kv_heads=1)
        return [Shape(heads=heads, batch=1, context=32, block_size=16).call()]
    return [
        Shape(
            heads=HEAD_SHAPES[name],
            batch=int(batch),
            context=int(context),
            block_size=int(block_size),
        ).call()
        for name in flags.FLAGS.heads
        for block_size in flags.FLAGS.block_sizes
        for batch in flags.FLAGS.batches
        for context in flags.FLAGS.contexts
    ]


def main(argv: list[str]) -> None:
    """Tune and write the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if flags.FLAGS.cpu_rehearsal:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    rehearsal = flags.FLAGS.cpu_rehearsal
    device = current_device()
    if not (rehearsal or device.is_cuda):
        sys.exit(f"no NVIDIA GPU here: {device.kind} (see --cpu_rehearsal)")
    entries = tune_all(
        _calls(),
        flags.FLAGS.backends,
        dataclasses.replace(H100, num_sms=1) if rehearsal else device,
        functools.partial(time_on_device, interpret=rehearsal),
        least_gain=flags.FLAGS.least_gain,
        budget_s=flags.FLAGS.budget_s,
        max_configs=2 if rehearsal else None,
    )
    name = "rehearsal" if rehearsal else device_name(device)
    table = {
        "schema": SCHEMA,
        "device_kind": device.kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "entries": entries,
    }
    path = Path(flags.FLAGS.out) / f"{name or 'unknown'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(entries)} entries in {path}")


def _define_flags() -> None:
    # Not at import: other programs of this folder have flags of the same names.
    flags.DEFINE_string("out", "tuned", "folder of the table")
    flags.DEFINE_list("backends", ["mosaic", "triton"], "whose configurations")
    flags.DEFINE_list("heads", ["llama3-8b", "llama3-70b/8", "smollm2", "gemma3-4b"], "shapes")
    flags.DEFINE_list("batches", ["1", "8", "32", "128"], "rows")
    flags.DEFINE_list("contexts", ["512", "2048", "8192", "32768"], "positions a row")
    flags.DEFINE_list("block_sizes", ["16", "64"], "positions a block")
    flags.DEFINE_float("least_gain", 0.03, "share by which a better one must be faster")
    flags.DEFINE_float("budget_s", 540.0, "no shape is begun after these seconds")
    flags.DEFINE_bool("cpu_rehearsal", False, "a toy size on a CPU: does it run?")


def run() -> None:
    """Entry point."""
    _define_flags()
    app.run(main)
