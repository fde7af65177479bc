"""How much memory sharing saves, and what a prefix cache hits: block tables alone, without a model.

    python scripts/measure_sharing.py                             # lengths like the paper's
    python scripts/measure_sharing.py --trace=azure_conv.csv      # those of a trace
    python scripts/measure_sharing.py --what=prefix --trace=mooncake.csv --tokens_per_id=512
    python scripts/measure_sharing.py --what=fit --trace=sharegpt.csv

docs/sharing.md says what is measured and what came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console

from paged_jax.simulation import lengths
from paged_jax.simulation.traces import TraceRequest, read_trace
from paged_jax_scripts import cli
from paged_jax_scripts.sharing import parallel_saving, prefix_table, saving_table

_WHAT = flags.DEFINE_enum("what", "parallel", ["parallel", "prefix", "fit"], "what to measure")
_TRACE = flags.DEFINE_multi_string(
    "trace", [], "CSV files of requests; parallel: instead of lengths like the paper's"
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", 2000, "most requests, of each trace or drawn", lower_bound=1
)
_SAMPLES = flags.DEFINE_list("samples", ["2", "4", "6"], "parallel: sequences a request")
_CONCURRENCY = flags.DEFINE_integer(
    "concurrency", 32, "parallel: requests that run at a time", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "parallel: of the drawn lengths")
_PROMPT_SPREAD = flags.DEFINE_float(
    "prompt_spread", lengths.PROMPT_SPREAD, "parallel: sigma of the drawn prompts' log lengths"
)
_OUTPUT_SPREAD = flags.DEFINE_float(
    "output_spread", lengths.OUTPUT_SPREAD, "parallel: sigma of the drawn outputs' log lengths"
)
_TOKENS_PER_ID = flags.DEFINE_integer(
    "tokens_per_id",
    None,
    "prefix: tokens of the trace's own blocks, a multiple of --block_size; all lengths are divided "
    "so that an id is one block. None: --block_size",
    lower_bound=1,
)
_CAPACITIES = flags.DEFINE_list(
    "capacities", ["1024", "4096", "16384", "65536"], "prefix: usable blocks of the pools to try"
)


def _print_parallel(console: Console) -> None:
    workloads: list[tuple[str, lengths.Dataset | None, list[TraceRequest]]] = [
        (Path(path).name, None, read_trace(path, max_requests=_NUM_REQUESTS.value))
        for path in _TRACE.value
    ] or [
        (
            f"{name} (lengths drawn)",
            dataset,
            lengths.draw_requests(
                dataset,
                _NUM_REQUESTS.value,
                seed=_SEED.value,
                prompt_spread=_PROMPT_SPREAD.value,
                output_spread=_OUTPUT_SPREAD.value,
            ),
        )
        for name, dataset in lengths.DATASETS.items()
    ]
    for name, dataset, requests in workloads:
        savings = {
            num_samples: parallel_saving(
                requests,
                num_samples=num_samples,
                block_size=_BLOCK_SIZE.value,
                concurrency=_CONCURRENCY.value,
            )
            for num_samples in map(int, _SAMPLES.value)
        }
        prompt_mean = sum(request.num_prompt for request in requests) / len(requests)
        output_mean = sum(request.num_output for request in requests) / len(requests)
        console.print(
            f"{name}: {len(requests)} requests, mean lengths {prompt_mean:.2f} and "
            f"{output_mean:.2f}; blocks saved by parallel sampling"
        )
        console.print(saving_table(dataset, savings))


def _print_prefix(console: Console) -> None:
    block_size = _BLOCK_SIZE.value
    tokens_per_id = _TOKENS_PER_ID.value or block_size
    if tokens_per_id % block_size:
        raise ValueError(f"tokens_per_id={tokens_per_id} must be a multiple of {block_size}")
    for path in _TRACE.value:
        requests = read_trace(
            path, max_requests=_NUM_REQUESTS.value, divide_by=tokens_per_id // block_size
        )
        console.print(f"{Path(path).name}: {len(requests)} requests, tokens found in the cache")
        capacities = [int(capacity) for capacity in _CAPACITIES.value]
        console.print(prefix_table(requests, block_size=block_size, capacities=capacities))


def _print_fit(console: Console) -> None:
    for path in _TRACE.value:
        requests = read_trace(path)
        for name, lens in (
            ("prompts", [request.num_prompt for request in requests]),
            ("outputs", [request.num_output for request in requests]),
        ):
            console.print(f"{Path(path).name}, {name}: sigma {lengths.fit_spread(lens):.4f}")


def main(argv: Sequence[str]) -> None:
    """Measure what the flags say."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {list(argv[1:])}")
    if _WHAT.value != "parallel" and not _TRACE.value:
        raise ValueError(f"trace=[] must name a file with what={_WHAT.value}")
    {"parallel": _print_parallel, "prefix": _print_prefix, "fit": _print_fit}[_WHAT.value](
        Console()
    )


if __name__ == "__main__":
    cli.run_program(main)
