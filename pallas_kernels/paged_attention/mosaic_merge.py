"""The merge of Mosaic decode's partial results: one thread block a unit (see `work.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.mosaic_common import (
    COLUMNS,
    LOWEST,
    MATRIX,
    MATRIX_TRANSPOSED,
    by_column,
    filled,
    kernel_options,
    load,
    store,
)
from pallas_kernels.paged_attention.mosaic_config import DecodeGeometry

LN_2 = 0.6931471805599453
UNROLLED_VALUES = 8192  # accumulator elements loaded ahead


def merge_partials(
    values: Float[Array, "I D columns"],
    sums: Float[Array, "I columns"],
    tops: Float[Array, "I columns"],
    unit_ptr: Int[Array, "U+1"],
    sinks: Float[Array, "H"] | None,
    *,
    geometry: DecodeGeometry,
    num_columns: int,
    out_dtype: Any,
    interpret: bool,
) -> tuple[Float[Array, "U pack T*G D"], Float[Array, "U pack T*G"]]:
    """Merge the partial results of each unit's items: weights 2**(top - common top).

    Args:
        values: sums of weight times V, in base 2 relative to `tops`.
        sums: sums of weights.
        tops: highest score in base 2, `LOWEST` where nothing was attended.
        unit_ptr: items `unit_ptr[u] .. unit_ptr[u + 1] - 1` belong to unit u.
        sinks: one logit a head, in the denominator only.
        geometry: the tiles' sizes.
        num_columns: columns in use of each head (T * G).
        out_dtype: dtype of the output.
        interpret: run in Pallas's interpreter.

    Returns:
        The output and the natural log of the sum of weights (-inf where nothing was attended).
    """
    _, D, columns = values.shape
    num_units, pack = unit_ptr.shape[0] - 1, geometry.pack
    unroll = max(1, min(4, UNROLLED_VALUES // (D * columns)))
    operands = [values, sums, tops, unit_ptr]
    if sinks is not None:
        operands.append(_sink_columns(sinks, geometry, num_columns))

    def merge_decode(*refs):
        values_ref, sums_ref, tops_ref, ptr_ref, *sinks_ref, out_ref, lse_ref, out_smem = refs
        unit = lax.axis_index("unit")
        begin, end = ptr_ref[unit], ptr_ref[unit + 1]

        def merge_items(turn, state):
            # All loads of a turn are independent of each other: several are in flight.
            indices = [begin + turn * unroll + j for j in range(unroll)]
            held = [jnp.minimum(index, end - 1) for index in indices]
            loaded = [
                (
                    load(tops_ref.at[i], COLUMNS),
                    load(sums_ref.at[i], COLUMNS),
                    load(values_ref.at[i], MATRIX),
                )
                for i in held
            ]
            for index, (top, weight, value) in zip(indices, loaded, strict=True):
                once = jnp.where(index < end, 1.0, 0.0)  # the last item is loaded again
                state = _merge(state, top, weight * once, value * once)
            return state

        empty = (
            filled((columns,), LOWEST, COLUMNS),
            filled((columns,), 0.0, COLUMNS),
            filled((D, columns), 0.0),
        )
        turns = lax.div(end - begin + (unroll - 1), unroll)
        top, weight, value = lax.fori_loop(0, turns, merge_items, empty)
        nothing = top <= LOWEST / 2  # false for NaN, which is to stay visible
        lse = (top + jnp.log2(jnp.where(nothing, 1.0, weight))) * LN_2
        store(lse_ref.at[unit], jnp.where(nothing, -jnp.inf, lse))
        total = jnp.where(nothing, 1.0, weight)
        if sinks_ref:
            group = lax.rem(unit, geometry.num_groups)
            total += jnp.exp2(load(sinks_ref[0].at[group], COLUMNS) - top)
        out = jnp.where(by_column(nothing, value), 0.0, value / by_column(total, value))
        out = plgpu.layout_cast(out.astype(out_dtype), MATRIX_TRANSPOSED)
        store(out_smem.transpose((1, 0)), out)
        plgpu.commit_smem()
        for head in range(pack):
            head_rows = out_smem.at[pl.ds(head * geometry.head_columns, num_columns)]
            plgpu.copy_smem_to_gmem(head_rows, out_ref.at[unit, head])
        plgpu.wait_smem_to_gmem(0)

    out, lse = plgpu.kernel(
        merge_decode,
        out_type=(
            jax.ShapeDtypeStruct((num_units, pack, num_columns, D), out_dtype),
            jax.ShapeDtypeStruct((num_units, columns), jnp.float32),
        ),
        grid=(num_units,),
        grid_names=("unit",),
        scratch_types=(plgpu.SMEM((columns, D), out_dtype),),
        **kernel_options(interpret=interpret),
    )(*operands)
    return out, lse.reshape(num_units, pack, geometry.head_columns)[..., :num_columns]


def _merge(state, top, weight, value):
    """Add one partial result to (top, weight, value)."""
    old_top, old_weight, old_value = state
    new_top = jnp.maximum(old_top, top)
    keep, add = jnp.exp2(old_top - new_top), jnp.exp2(top - new_top)
    new_value = old_value * by_column(keep, old_value) + value * by_column(add, value)
    return new_top, old_weight * keep + weight * add, new_value


def _sink_columns(
    sinks: Float[Array, "H"], geometry: DecodeGeometry, num_columns: int
) -> Float[Array, "K/pack columns"]:
    """Sinks in base 2 by head group and column (c = t * G + g)."""
    num_heads = geometry.num_groups * geometry.pack
    group = sinks.shape[0] // num_heads
    sinks = (sinks.astype(jnp.float32) / LN_2).reshape(num_heads, 1, group)  # [K, 1, G]
    sinks = jnp.broadcast_to(sinks, (num_heads, num_columns // group, group))
    padding = geometry.head_columns - num_columns
    sinks = jnp.pad(sinks.reshape(num_heads, num_columns), ((0, 0), (0, padding)))
    return sinks.reshape(geometry.num_groups, geometry.columns)
