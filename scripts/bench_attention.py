"""Decode attention over the paged pool against dense caches: time of write + attend, in pairs.

Every round runs the paged step (backend xla) and each dense form once, one after the other, so
that a ratio compares neighbours in time. The dense caches are head-major, [B, K, C, D]. Printed
are medians and quartiles; ratios are paged over the dense form with the least median.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from paged_jax_scripts.attention_timing import (
    Shape,
    fastest_dense,
    paged_form,
    ratios_of,
    timed_forms,
)
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES

_QUICK = flags.DEFINE_bool("quick", False, "one toy shape, three pairs: does it run?")
_PAIRS = flags.DEFINE_integer("pairs", 15, "timed rounds a shape", lower_bound=3)
_BATCHES = flags.DEFINE_list("batches", ["8", "32"], "batch sizes")
_CONTEXTS = flags.DEFINE_list("contexts", ["512", "1024", "2048", "4096"], "tokens of context")
_HEADS = flags.DEFINE_list("heads", ["smollm2", "llama3-8b"], "names of head shapes")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "dtypes of queries and cache")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block")
_CACHE_BYTES = flags.DEFINE_integer(
    "cache_bytes",
    256 * 2**20,
    "layers are added, from 2 to 32, until the cache has these bytes: a model's cache is larger "
    "than the processor's",
)


def quartiles(values: list[float]) -> str:
    """`median [first..third quartile]`."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:.2f} [{low:.2f}..{high:.2f}]"


def measure(shape: Shape, *, pairs: int, check: bool = True) -> float:
    """Print a shape's times and ratios; return the median ratio to the best dense form."""
    heads = shape.heads
    forms = timed_forms(shape, pairs=pairs, check=check)
    best = fastest_dense(forms)
    ratios = ratios_of(forms["paged"], forms[best])
    print(
        f"{heads.name:10} {shape.dtype:8} B {shape.batch:<3} context {shape.context:<5} "
        f"layers {shape.layers}  ratio {quartiles(ratios)} to {best}"
    )
    for name, form in forms.items():
        milliseconds = [second * 1e3 for second in form.seconds]
        print(
            f"    {name:12} {quartiles(milliseconds)} ms   alias "
            f"{form.alias_bytes / shape.cache_bytes:.0%}  temp "
            f"{form.temp_bytes / shape.cache_bytes:.1%}",
            flush=True,
        )
    return float(np.median(ratios))


def measure_width(shape: Shape, *, pairs: int) -> float:
    """Print and return what a 32 times wider block table costs at the same context."""
    heads = shape.heads
    size = (shape.layers, 2, shape.batch, heads.num_kv_heads, shape.context, heads.head_dim)
    kv = np.random.default_rng(0).standard_normal(size, np.float32).astype(shape.dtype)
    narrow = paged_form(shape, kv)
    wide = paged_form(dataclasses.replace(shape, width_factor=32), kv)
    x = jnp.ones((shape.batch, heads.num_heads, heads.head_dim), kv.dtype)
    for i in range(pairs + 1):
        for form in (narrow, wide):
            form.step(x)
            if i == 0:
                form.seconds.clear()
    ratios = ratios_of(wide, narrow)
    print(
        f"{heads.name:10} {shape.dtype:8} B {shape.batch:<3} context {shape.context:<5} "
        f"table 32 times wider: ratio {quartiles(ratios)}"
    )
    return float(np.median(ratios))


def _shapes() -> list[Shape]:
    if _QUICK.value:
        toy = HEAD_SHAPES["toy"]
        return [Shape(heads=toy, batch=2, context=64, dtype="float32", block_size=16, layers=2)]
    shapes = []
    for name in _HEADS.value:
        for dtype in _DTYPES.value:
            for batch in _BATCHES.value:
                for context in _CONTEXTS.value:
                    shape = Shape(
                        heads=HEAD_SHAPES[name],
                        batch=int(batch),
                        context=int(context),
                        dtype=dtype,
                        block_size=_BLOCK_SIZE.value,
                        layers=1,
                    )
                    layers = max(2, min(32, _CACHE_BYTES.value // shape.cache_bytes))
                    shapes.append(dataclasses.replace(shape, layers=layers))
    return shapes


def main(argv: list[str]) -> None:
    """Measure every shape of the flags, then the table's width."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    pairs = 3 if _QUICK.value else _PAIRS.value
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {pairs} rounds, times in ms")
    shapes = _shapes()
    # At toy size the temporaries are no small share of the cache.
    ratios = [measure(shape, pairs=pairs, check=not _QUICK.value) for shape in shapes]
    print(
        f"geometric mean of {len(ratios)} ratios {math.exp(np.mean(np.log(ratios))):.2f}, "
        f"largest {max(ratios):.2f}"
    )
    measure_width(dataclasses.replace(shapes[0], batch=min(8, shapes[0].batch)), pairs=pairs)


def run() -> None:
    """Entry point."""
    app.run(main)


if __name__ == "__main__":
    run()
