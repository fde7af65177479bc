"""Every kernel against `reference` on the device, and the same input again and again."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import GPU_BACKENDS
from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.api import BACKENDS as COPY
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import BACKENDS as WRITE
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES

from .cases import DTYPES, TOLERANCES, AttentionCase, attention_arrays, attention_cases
from .worker import Context, Item, Prepared, Programs, lower, use

BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def numerics_items(context: Context) -> list[Item]:
    """Attention in every case, then writes and copies, a backend after the other."""
    items = []
    for index, case in enumerate(attention_cases(rehearsal=context.rehearsal)):
        if index == 2:  # the in-place ops after the first two
            items += _write_and_copy_items(context)
        for backend in context.backends:
            items.append(
                Item(
                    item_id=f"attention/{backend}/{case.name}",
                    section="numerics",
                    contender=backend,
                    prepare=functools.partial(_prepare_attention, context, backend, case),
                )
            )
    if context.rehearsal:
        items += _write_and_copy_items(context)
    return items


def attend(context: Context, backend: str, **scalars: Any) -> Callable[..., Any]:
    """`(args, arrays) -> (out, lse)` of a backend; in a rehearsal GPU kernels are interpreted."""

    def op(args: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
        return paged_attention(
            *args,
            **arrays,
            **scalars,
            return_lse=True,
            backend=backend,
            interpret=context.rehearsal,
        )

    return op


@functools.lru_cache(maxsize=4)
def _reference(case: AttentionCase) -> jax.stages.Lowered:
    """The reference of a case, lowered once for all backends."""
    call = attention_arrays(case)

    def op(args: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
        return paged_attention(
            *args, **arrays, **call.scalars, return_lse=True, backend="reference"
        )

    return lower(jax.jit(op), *_shapes((call.args, call.arrays)))


def _prepare_attention(context: Context, backend: str, case: AttentionCase) -> Prepared:
    call = attention_arrays(case)
    op = attend(context, backend, **call.scalars)
    lowered = lower(jax.jit(op), *_shapes((call.args, call.arrays)))

    def run(programs: Programs) -> dict[str, Any]:
        given = jax.device_put((call.args, call.arrays))
        wanted = jax.device_get(use(programs, "reference")(*given))
        got = jax.device_get(use(programs, "tested")(*given))
        return compare(got, wanted, TOLERANCES[case.kv_dtype])

    return Prepared(programs={"reference": _reference(case), "tested": lowered}, run=run)


def compare(got: Any, wanted: Any, tolerance: float) -> dict[str, Any]:
    """The largest difference of outputs and lse, and where; NaN and misplaced -inf are failures."""
    fields: dict[str, Any] = {"status": "pass", "tolerance": tolerance}
    for name, x, y in zip(("out", "lse"), got, wanted, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        with np.errstate(invalid="ignore"):
            # Relative to large values: of what is rounded, the rounding grows with it.
            error = np.abs(x - y) / np.maximum(1.0, np.abs(y))
        error = np.where((x == y) | (np.isinf(x) & (x == y)), 0.0, error)
        error = np.where(np.isfinite(error), error, np.inf)
        at = np.unravel_index(int(error.argmax()), error.shape)
        worst = float(error[at])
        fields[f"{name}_error"] = worst if np.isfinite(worst) else "not finite"
        if worst > tolerance:
            where = ", ".join(str(int(i)) for i in at)
            fields["status"] = "fail"
            fields["reason"] = f"{name}[{where}] is {x[at]}, must be {y[at]}"
    fields["note"] = f"out {fields['out_error']:.1e}" if fields["status"] == "pass" else ""
    return fields


def _write_and_copy_items(context: Context) -> list[Item]:
    if context.rehearsal:
        sizes = [("float32", 3)]
    else:
        sizes = [(dtype, new) for dtype in DTYPES for new in (1, 64)]
    ops = {"kv_write": (_prepare_write, WRITE), "block_copy": (_prepare_copy, COPY)}
    return [
        Item(
            item_id=f"{op}/{backend}/{kv_dtype}-{new}",
            section="numerics",
            contender=backend,
            prepare=functools.partial(prepare, context, backend, kv_dtype, new),
        )
        for kv_dtype, new in sizes
        for op, (prepare, known) in ops.items()
        for backend in context.backends
        if backend in known and (op == "kv_write" or kv_dtype not in QUANTIZED_DTYPES)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InPlaceCall:
    """An op that changes a pool: `op(backend)(pool, *args)` and its arguments.

    The pool is a tuple: its elements and, of 8-bit pools, their scales.
    """

    op: Callable[[str], Callable[..., Any]]
    pool: tuple[np.ndarray, ...]
    args: tuple[np.ndarray, ...]


def write_call(context: Context, kv_dtype: str, new: int) -> InPlaceCall:
    """A call of `kv_write` into a pool of NaN, with padded rows and shuffled slots."""
    rng = np.random.default_rng(new)
    K, S, D = (1, 16, 64) if context.rehearsal else (8, 16, 128)
    B = 3 if context.rehearsal else 24
    N = B * new + 2
    is_quantized = kv_dtype in QUANTIZED_DTYPES
    dtype = DTYPES[kv_dtype]
    garbage = 127 if kv_dtype == "int8" else np.nan
    pool = (np.full((N, 2, K, S, D), garbage, np.float32).astype(dtype),)
    if is_quantized:
        pool += (np.full((N, 2, K, S), np.nan, np.float32),)
    new_dtype = DTYPES["bfloat16"] if is_quantized else dtype
    k, v = (rng.normal(size=(B, new, K, D)).astype(new_dtype) for _ in range(2))
    slots = (S + rng.permutation((N - 1) * S)[: B * new]).reshape(B, new).astype(np.int32)
    q_lens = rng.integers(1, new + 1, size=B).astype(np.int32)
    q_lens[1] = 0

    def op(backend: str) -> Callable[..., Any]:
        def write(pool: Any, *args: Any) -> Any:
            options: dict[str, Any] = {"kv_scales": pool[1]} if is_quantized else {}
            options |= {"backend": backend, "interpret": context.rehearsal}
            written = kv_write(pool[0], *args, **options)
            return written if is_quantized else (written,)

        return write

    return InPlaceCall(op=op, pool=pool, args=(k, v, slots, q_lens))


def copy_call(context: Context, kv_dtype: str, num_pairs: int) -> InPlaceCall:
    """A call of `block_copy` over several layers, with padding pairs."""
    rng = np.random.default_rng(num_pairs)
    K, S, D = (1, 16, 64) if context.rehearsal else (8, 16, 128)
    L, P = 2, 2 * num_pairs + 6
    pool = rng.normal(size=(L, P, 2, K, S, D)).astype(jnp.dtype(kv_dtype))
    blocks = 1 + rng.permutation(P - 1)[: 2 * num_pairs]
    pairs = np.zeros((2, num_pairs + 2), np.int32)
    pairs[:, :num_pairs] = blocks.reshape(2, num_pairs)

    def op(backend: str) -> Callable[..., Any]:
        def copy(pool: Any, *args: Any) -> Any:
            return (block_copy(pool[0], *args, backend=backend, interpret=context.rehearsal),)

        return copy

    return InPlaceCall(op=op, pool=(pool,), args=(pairs[0], pairs[1]))


def _prepare_write(context: Context, backend: str, kv_dtype: str, new: int) -> Prepared:
    return _prepare_in_place(write_call(context, kv_dtype, new), backend, block_axis=0)


def _prepare_copy(context: Context, backend: str, kv_dtype: str, new: int) -> Prepared:
    return _prepare_in_place(copy_call(context, kv_dtype, new), backend, block_axis=1)


def _prepare_in_place(call: InPlaceCall, backend: str, *, block_axis: int) -> Prepared:
    shapes = _shapes((call.pool, *call.args))
    programs = {
        name: lower(jax.jit(call.op(name), donate_argnums=0), *shapes)
        for name in ("reference", backend)
    }

    def run(compiled: Programs) -> dict[str, Any]:
        results = []
        for name in ("reference", backend):
            program = use(compiled, name)
            pool = program(jax.device_put(call.pool), *jax.device_put(call.args))
            # The null block's content is nobody's.
            results.append([np.delete(np.asarray(x), 0, axis=block_axis) for x in pool])
        wrong = [_difference(x, y, len(call.pool) > 1) for x, y in zip(*results, strict=True)]
        reason = "; ".join(x for x in wrong if x)
        if reason:
            return {"status": "fail", "reason": f"{reason} (null block not counted)"}
        note = "equal bits" if len(call.pool) == 1 else "equal but for roundings"
        return {"status": "pass", "note": note, **memory_of(use(compiled, backend))}

    return Prepared(programs=programs, run=run)


def _difference(wanted: np.ndarray, got: np.ndarray, is_quantized: bool) -> str:
    """What differs, or "": any bit; of 8-bit pools more than a rounding to the next value."""
    if is_quantized:
        x, y = wanted.astype(np.float64), got.astype(np.float64)
        # One step of int8, of e4m3's 3 bits of mantissa, of a float32 scale.
        step = 1e-6 * np.abs(x) if x.ndim == 4 else np.maximum(1.0, np.abs(x) / 8)
        different = ~((np.abs(x - y) <= step) | (np.isnan(x) & np.isnan(y)))
    else:
        different = wanted.view(f"u{wanted.dtype.itemsize}") != got.view(f"u{got.dtype.itemsize}")
    if not different.any():
        return ""
    return f"{different.sum()} elements differ, the first at {np.argwhere(different)[0].tolist()}"


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes that a compiled program aliases and needs besides."""
    memory = compiled.memory_analysis()
    if memory is None:
        return {}
    return {
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def racing_items(context: Context) -> list[Item]:
    """Decode, prefill, write and copy, many times over on the same input."""
    if context.rehearsal:
        decode = attention_cases(rehearsal=True)[0]
        calls: dict[str, Any] = {"decode": decode}
    else:
        decode = AttentionCase(num_kv_heads=8, longest=3000)
        prefill = dataclasses.replace(decode, max_new=128, longest=2000)
        calls = {
            "decode": decode,
            "decode S64": dataclasses.replace(decode, block_size=64),
            "prefill": prefill,
            "kv_write": write_call(context, "bfloat16", 64),
            "block_copy": copy_call(context, "bfloat16", 64),
        }
    return [
        Item(
            item_id=f"racing/{name}/{backend}",
            section="racing",
            contender=backend,
            prepare=functools.partial(_prepare_racing, context, backend, call),
        )
        for name, call in calls.items()
        for backend in context.backends
        if backend in {"kv_write": WRITE, "block_copy": COPY}.get(name, GPU_BACKENDS)
        if backend in GPU_BACKENDS
    ]


def _prepare_racing(context: Context, backend: str, call: Any) -> Prepared:
    if isinstance(call, InPlaceCall):
        op, given = call.op(backend), (call.pool, *call.args)
    else:
        arrays = attention_arrays(call)
        op = attend(context, backend, **arrays.scalars)
        given = (arrays.args, arrays.arrays)
    repeats = 2 if context.rehearsal else 50

    def count_different(first: Any, again: Any) -> Any:
        leaves = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        return sum(jnp.sum(_bits(x) != _bits(y)) for x, y in leaves)

    def run(programs: Programs) -> dict[str, Any]:
        program, count = use(programs, "op"), jax.jit(count_different)
        on_device = jax.device_put(given)
        first = program(*on_device)
        counts = [count(first, program(*on_device)) for _ in range(repeats - 1)]
        different = [int(n) for n in counts]
        if any(different):
            runs = sum(n > 0 for n in different)
            reason = f"{runs} of {repeats - 1} repeats differ, by up to {max(different)} elements"
            return {"status": "fail", "reason": reason, "repeats": repeats}
        return {"status": "pass", "repeats": repeats, "note": f"{repeats} times the same bits"}

    return Prepared(programs={"op": lower(jax.jit(op), *_shapes(given))}, run=run)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
