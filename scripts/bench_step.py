"""The decode step beside its floor and beside dense caches: where its time goes.

The floor is what this machine needs at least: the bytes of weights and of keys and values over the
bandwidth of reading, or the operations over the rate of a large matrix product, whichever takes
longer; both rates are measured here, by XLA, in the same run. Every round runs each form once, one
after the other, so that a ratio compares neighbours in time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from models.common.weights import unstack_layers
from paged_jax import Model
from paged_jax_scripts import cli
from paged_jax_scripts.step_forms import (
    Form,
    dense_form,
    paged_form,
    rest_form,
    unrolled_form,
)

BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "rows of a step")
CONTEXT = flags.DEFINE_integer("context", 256, "tokens of each row's context", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 15, "timed rounds a batch", lower_bound=1)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
UNROLLED = flags.DEFINE_bool("unrolled_dense", True, "also the simplest dense form")
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)

# Larger than any processor's caches.
_READ_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does at best.

    Attributes:
      bytes_per_second: of reading an array that is larger than the caches.
      flops: of a large matrix product in the weights' dtype, operations a second.
    """

    bytes_per_second: float
    flops: float


def measure_machine(dtype: str, *, rounds: int = 5) -> Machine:
    """Measure both rates; the best of some rounds, since a floor is wanted."""
    x = jnp.ones(_READ_BYTES // 4, jnp.float32)
    read = _best_seconds(jax.jit(jnp.sum), x, rounds=rounds)
    size = 2048
    square = jnp.ones((size, size), dtype)
    product = _best_seconds(jax.jit(jnp.matmul), square, square, rounds=rounds)
    return Machine(_READ_BYTES / read, 2 * size**3 / product)


def _best_seconds(function: Callable[..., Any], *args: Any, rounds: int) -> float:
    jax.block_until_ready(function(*args))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        best = min(best, time.perf_counter() - begin)
    return best


def floor_seconds(model: Model, machine: Machine, batch: int, context: int, dtype: str) -> float:
    """The least time of a step: every weight and cached entry is read, and all is multiplied.

    Args:
      model: its weights are each used once a token; embedding rows are counted as the head's.
      machine: what it runs on.
      batch: rows.
      context: tokens that each attends to.
      dtype: of the cache.
    """
    spec = model.spec
    weights = jax.tree.leaves(model.params)
    num_weights = sum(leaf.size for leaf in weights)
    weight_bytes = sum(leaf.nbytes for leaf in weights)
    entries = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * batch * context
    scores = 2 * spec.num_layers * spec.num_heads * spec.head_dim * batch * context
    read = weight_bytes + entries * jnp.dtype(dtype).itemsize
    operations = 2 * num_weights * batch + 2 * scores
    return max(read / machine.bytes_per_second, operations / machine.flops)


def measure(model: Model, batch: int, *, context: int, rounds: int, dtype: str) -> dict[str, Form]:
    """Time all forms of one batch size in turns."""
    layers = unstack_layers(
        jax.tree.map(lambda leaf: leaf, model.params), num_layers=model.spec.num_layers
    )
    unrolled = dataclasses.replace(model, params=layers)
    paged = functools.partial(paged_form, block_size=BLOCK_SIZE.value, dtype=dtype)
    forms = {
        "paged": paged(model, batch, context),
        "paged, unrolled": paged(unrolled, batch, context),
        "dense": dense_form(model, batch, context, dtype=dtype),
        "without attention": rest_form(model, batch, context),
    }
    if UNROLLED.value:
        forms["dense, unrolled"] = unrolled_form(unrolled, batch, context, dtype=dtype)
    for _ in range(rounds):
        for form in forms.values():
            form.step()
    return forms


def quartiles(values: Sequence[float], unit: float = 1.0) -> str:
    """Return ``median [first..third quartile]``, divided by ``unit``."""
    low, median, high = np.percentile(np.asarray(values) / unit, [25, 50, 75])
    return f"{median:.2f} [{low:.2f}..{high:.2f}]"


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    dtype, context = cli.DTYPE.value, CONTEXT.value
    model = cli.load_model()
    machine = measure_machine(dtype)
    console = Console(width=120)
    console.print(
        f"{model.name}, {dtype}, context {context}: reads {machine.bytes_per_second / 1e9:.1f} "
        f"GB/s, multiplies {machine.flops / 1e9:.0f} billion operations/s"
    )
    records = []
    for batch in map(int, BATCHES.value):
        forms = measure(model, batch, context=context, rounds=ROUNDS.value, dtype=dtype)
        floor = floor_seconds(model, machine, batch, context, dtype)
        dense = [name for name in forms if name.startswith("dense")]
        best = min(dense, key=lambda name: float(np.median(forms[name].seconds)))
        table = Table(title=f"{batch} rows; floor {floor * 1e3:.1f} ms", title_justify="left")
        for column in ("form", "ms", "over the floor", f"over {best}", "compiled in s"):
            table.add_column(column, justify="right" if column != "form" else "left", no_wrap=True)
        for name, form in forms.items():
            ratios = np.divide(form.seconds, forms[best].seconds).tolist()
            over_floor = quartiles(form.seconds, floor)
            cells = quartiles(form.seconds, 1e-3), over_floor, quartiles(ratios)
            table.add_row(name, *cells, f"{form.compile_seconds:.1f}")
            records.append({"batch": batch, "form": name, "floor": floor, "seconds": form.seconds})
        console.print(table)
        del forms
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump({"machine": dataclasses.asdict(machine), "steps": records}, file, indent=2)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
