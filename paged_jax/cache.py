"""What a model sees of the KV cache: one ``attend`` a layer, paged or dense behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from paged_jax.config import ModelSpec, require
from paged_jax.dense_attention import Queries, dense_attention
from paged_jax.pool import NULL_BLOCK, KVPool, run_pool_op
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention, plan_attention

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.work import Work

ScoreFn = Callable[..., Array]


class KVCache(Protocol):
    """The interface that every model is written against."""

    def attend(
        self,
        layer: Int[Array, ""] | int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        scale: float | None = None,
        window: Int[Array, ""] | int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        score_fn: ScoreFn | None = None,
    ) -> tuple[Float[Array, "B T H D"], Self]:
        """Store the new keys and values of ``layer``, then attend to all of them, causally.

        Args:
          layer: layer index, traced or not.
          q: queries; row b's first ``q_lens[b]`` are real, the rest padding.
          k: new keys, in the same positions.
          v: new values, in the same positions.
          scale: factor on the scores; None means ``D ** -0.5``.
          window: attend to exactly this many keys, the query's own included; None means all.
          soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
          sinks: one extra logit a head that takes part in the softmax's sum only.
          score_fn: ``score_fn(score, row, head, q_pos, k_pos)`` after scale and soft cap.

        Returns:
          The outputs (zeros at padding) and the cache with the new entries.
        """
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "block_tables", "slot_mapping", "kv_lens", "q_lens", "work"],
    meta_fields=["backend", "interpret", "max_window"],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """A step's view of the pool: which blocks each row reads and which slots it writes.

    Attributes:
      pool: the blocks of all sequences.
      block_tables: each row's blocks in logical order; unused entries are the null block.
      slot_mapping: where each new token goes, ``block_id * S + offset``.
      kv_lens: tokens each row may attend to, this step's included.
      q_lens: this step's new tokens a row; 0 marks a padding row.
      backend: attention backend, or None for the best one here.
      interpret: run a GPU backend in Pallas's interpreter (for tests).
      work: what the layers share of the attention (``plan_attention``), or None.
      max_window: keys that a query may attend to in any layer, the others' blocks may be gone; None
        when all are there.
    """

    pool: KVPool
    block_tables: Int[Array, "B M"]
    slot_mapping: Int[Array, "B T"]
    kv_lens: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    backend: str | None = None
    interpret: bool = False
    work: Work | None = None
    max_window: int | None = None

    @classmethod
    def from_tables(
        cls,
        pool: KVPool,
        block_tables: Int[Array, "B M"],
        starts: Int[Array, "B"],
        q_lens: Int[Array, "B"],
        *,
        num_new: int,
        num_heads: int | None = None,
        backend: str | None = None,
        interpret: bool = False,
        max_window: int | None = None,
    ) -> PagedKVCache:
        """Derive the slots from the tables.

        Args:
          pool: the blocks.
          block_tables: each row's blocks in logical order, enough for ``starts + q_lens`` tokens.
          starts: position of each row's first new token.
          q_lens: new tokens a row, at most ``num_new``.
          num_new: padded width of a row (T).
          num_heads: query heads (H), where all layers have as many: GPU attention is then planned
            once for all of them.
          backend: attention backend, or None for the best one here.
          interpret: run a GPU backend in Pallas's interpreter (for tests).
          max_window: keys that a query may attend to in any layer (``ModelSpec.window``).
        """
        block_size, table_width = pool.block_size, block_tables.shape[1]
        offsets = jnp.arange(num_new, dtype=jnp.int32)
        positions = starts[:, None] + offsets  # [B, T]
        is_new = offsets < q_lens[:, None]  # [B, T]
        entry = jnp.clip(positions // block_size, 0, table_width - 1)
        block_ids = jnp.where(is_new, jnp.take_along_axis(block_tables, entry, axis=1), NULL_BLOCK)
        slot_mapping = block_ids * block_size + jnp.where(is_new, positions % block_size, 0)
        kv_lens = jnp.where(q_lens > 0, starts + q_lens, 0)
        work = None
        if num_heads is not None:
            work = plan_attention(
                jax.ShapeDtypeStruct(pool.blocks.shape[1:], pool.blocks.dtype),
                kv_lens,
                q_lens,
                num_heads=num_heads,
                num_new=num_new,
                table_width=table_width,
                backend=backend,
                interpret=interpret,
            )
        return cls(
            pool, block_tables, slot_mapping, kv_lens, q_lens, backend, interpret, work, max_window
        )

    def attend(
        self,
        layer: Int[Array, ""] | int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Any,
    ) -> tuple[Float[Array, "B T H D"], PagedKVCache]:
        """See ``KVCache.attend``."""
        require(
            not isinstance(layer, int) or 0 <= layer < self.pool.num_layers,
            f"layer={layer} must be in 0..{self.pool.num_layers - 1}: the pool was made for "
            f"ModelSpec.num_layers={self.pool.num_layers}",
        )
        self._check_window(options.get("window"))
        num_blocks, block_size = self.pool.num_blocks, self.pool.block_size
        first_block = jnp.asarray(layer, jnp.int32) * num_blocks
        # Layers are folded into the block ids: slicing a layer out of the pool would copy it.
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.pool)  # [L*P, 2, K, S, D]
        flat = self._write(flat, k, v, self.slot_mapping + first_block * block_size)
        out = paged_attention(
            q,
            flat.blocks,
            self.block_tables + first_block,
            self.kv_lens,
            self.q_lens,
            kv_scales=flat.scales,
            work=self.work,
            backend=self.backend,
            interpret=self.interpret,
            **options,
        )
        assert not isinstance(out, tuple)  # no lse was asked for
        pool = jax.tree.map(lambda x, like: _as_stored(x.reshape(like.shape)), flat, self.pool)
        return out, dataclasses.replace(self, pool=pool)

    def _check_window(self, window: Any) -> None:
        """Refuse what would read blocks that were freed; a traced window must be right."""
        if self.max_window is not None and not isinstance(window, jax.Array):
            require(
                window is not None and window <= self.max_window,
                f"window={window} must be at most ModelSpec.window={self.max_window}: what is "
                "behind that in all layers is freed",
            )

    def _write(self, flat: KVPool, k: Array, v: Array, slots: Int[Array, "B T"]) -> KVPool:
        """The pool, layers folded, with the new keys and values in their slots."""

        def write(backend: str | None) -> Any:
            return kv_write(
                flat.blocks,
                k,
                v,
                slots,
                self.q_lens,
                kv_scales=flat.scales,
                backend=backend,
                interpret=self.interpret,
            )

        return run_pool_op(write, self.backend, like=flat)


def _as_stored(x: Array) -> Array:
    """``x``, its axes in memory in their order."""
    # Where an axis has length 1 (one key/value head, say) XLA is free to call it the outermost in
    # memory, and in layers without a scan it did: it then copied the pool to move nothing.
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if 1 in x.shape else x


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv", "starts", "q_lens", "regions"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DenseKVCache:
    """The contiguous baseline: regions of C positions, reserved whole.

    Attributes:
      kv: ``[L, N, 2, K, C, D]``, N regions, head-major like the pool's blocks.
      starts: position of each row's first new token (its length before this step).
      q_lens: this step's new tokens a row; 0 marks a padding row.
      regions: the region of each row; where T is 1, no two rows have the same. None: row b has
        region b.
    """

    kv: Float[Array, "L N 2 K C D"]
    starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    regions: Int[Array, "B"] | None = None

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        *,
        batch_size: int,
        capacity: int,
        dtype: Any = jnp.float32,
        fill: float = 0.0,
    ) -> DenseKVCache:
        """Reserve ``capacity`` positions for each of ``batch_size`` rows."""
        shape = (spec.num_layers, batch_size, 2, spec.num_kv_heads, capacity, spec.head_dim)
        kv = jax.jit(lambda: jnp.full(shape, fill, dtype=dtype))()
        zeros = jnp.zeros((batch_size,), jnp.int32)
        return cls(kv, zeros, zeros)

    def at(self, starts: Int[Array, "B"], q_lens: Int[Array, "B"]) -> DenseKVCache:
        """Return the same cache, set to receive ``q_lens`` new tokens at ``starts``."""
        return dataclasses.replace(self, starts=starts, q_lens=q_lens)

    @property
    def pool(self) -> KVPool:
        """The regions as long blocks: the layouts are the same."""
        return KVPool(self.kv)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.kv.size * self.kv.dtype.itemsize

    def attend(
        self,
        layer: Int[Array, ""] | int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Any,
    ) -> tuple[Float[Array, "B T H D"], DenseKVCache]:
        """See ``KVCache.attend``."""
        batch_size, num_new = q.shape[:2]
        num_regions, capacity = self.kv.shape[1], self.kv.shape[4]
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        offsets = jnp.arange(num_new, dtype=jnp.int32)
        positions = self.starts[:, None] + offsets  # [B, T]
        # Padding goes one past the end and is dropped; -1 would wrap to the last slot.
        target = jnp.where(offsets < self.q_lens[:, None], positions, capacity)
        regions = rows if self.regions is None else self.regions
        regions = jnp.where(self.q_lens > 0, regions, num_regions)
        new_kv = jnp.stack([k, v], axis=2).astype(self.kv.dtype)  # [B, T, 2, K, D]
        kv = self.kv.at[layer, regions[:, None], :, :, target].set(new_kv, mode="drop")
        cache = dataclasses.replace(self, kv=kv)
        arrays = Queries(q, self.starts, self.q_lens, rows)
        if self.regions is None:
            return dense_attention(arrays, kv, layer, **options), cache
        if num_new > 1:
            return dense_attention(arrays, kv, layer, regions=regions, **options), cache
        # One query a region is moved to its region sooner than the regions are gathered for them.
        arrays = jax.tree.map(
            lambda x: (
                jnp.zeros((num_regions, *x.shape[1:]), x.dtype).at[regions].set(x, mode="drop")
            ),
            arrays,
        )
        out = dense_attention(arrays, kv, layer, **options)
        return out.at[regions].get(mode="fill", fill_value=0), cache
