"""What a model sees of the KV cache: one ``attend`` a layer, paged or dense behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax.config import ModelSpec, require
from paged_jax.pool import NULL_BLOCK, KVPool, run_pool_op
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention, plan_attention

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.work import Work

ScoreFn = Callable[..., Array]
# Positions that dense attention reads at a time: their keys and values stay in a fast cache.
DENSE_SLICE = 256


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
        pool = jax.tree.map(lambda x, like: x.reshape(like.shape), flat, self.pool)
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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kv", "starts", "q_lens"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class DenseKVCache:
    """The contiguous baseline: one region of C positions a row, reserved whole.

    Attributes:
      kv: ``[L, B, 2, K, C, D]``, head-major like the pool's blocks.
      starts: position of each row's first new token (its length before this step).
      q_lens: this step's new tokens a row; 0 marks a padding row.
    """

    kv: Float[Array, "L B 2 K C D"]
    starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]

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
        capacity = self.kv.shape[4]
        offsets = jnp.arange(num_new, dtype=jnp.int32)
        positions = self.starts[:, None] + offsets  # [B, T]
        # Padding goes one past the end and is dropped; -1 would wrap to the last slot.
        target = jnp.where(offsets < self.q_lens[:, None], positions, capacity)
        rows = jnp.arange(batch_size)[:, None]
        new_kv = jnp.stack([k, v], axis=2).astype(self.kv.dtype)  # [B, T, 2, K, D]
        kv = self.kv.at[layer, rows, :, :, target].set(new_kv, mode="drop")
        out = dense_attention(q, kv, layer, self.starts, self.q_lens, **options)
        return out, dataclasses.replace(self, kv=kv)


def dense_attention(
    q: Float[Array, "B T H D"],
    kv: Float[Array, "L B 2 K C D"],
    layer: Int[Array, ""] | int,
    starts: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    scale: float | None = None,
    window: Int[Array, ""] | int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    score_fn: ScoreFn | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention of one layer of a contiguous cache, read in slices of positions.

    A whole layer would be copied before it is read, and positions that no row has reached would be
    computed. Independent of the paged op on purpose: the two are compared with each other.

    Args:
      q: queries.
      kv: keys (index 0 of the third axis) and values of all layers, the new ones included.
      layer: the layer, traced or not.
      starts: position of each row's first query.
      q_lens: real queries a row.
      scale: see ``KVCache.attend``, as for the rest.
      window: likewise.
      soft_cap: likewise.
      sinks: likewise.
      score_fn: likewise.

    Returns:
      Outputs in q's dtype; zeros at padding.
    """
    B, T, H, D = q.shape
    K, C = kv.shape[3:5]
    G, width = H // K, min(DENSE_SLICE, C)
    factor = D**-0.5 if scale is None else scale
    # Batch axes first: XLA on CPU multiplies 16-bit operands into float32 in this order only.
    grouped = q.astype(kv.dtype).reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    kv_lens = jnp.where(q_lens > 0, starts + q_lens, 0)
    positions = starts[:, None] + jnp.arange(T, dtype=jnp.int32)  # [B, T]
    is_query = jnp.arange(T) < q_lens[:, None]  # [B, T]
    rows, heads = jnp.arange(B).reshape(B, 1, 1, 1, 1), jnp.arange(H).reshape(1, K, G, 1, 1)

    def attend(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = sums
        # The last slice ends at C: what it shares with the one before was seen there.
        begin = jnp.minimum(index * width, C - width)
        k_pos = begin + jnp.arange(width, dtype=jnp.int32)
        is_written = (k_pos < kv_lens[:, None]) & (k_pos >= index * width)  # [B, width]
        part = jax.lax.dynamic_slice(kv, (layer, 0, 0, 0, begin, 0), (1, B, 2, K, width, D))[0]
        scores = factor * jnp.einsum(
            "bkgtd,bkcd->bkgtc", grouped, part[:, 0], preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if score_fn is not None:
            scores = score_fn(scores, rows, heads, positions[:, None, None, :, None], k_pos)
        seen = is_written[:, None] & (k_pos <= positions[..., None]) & is_query[..., None]
        if window is not None:
            seen &= k_pos > positions[..., None] - window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)  # seen: [B, T, width]
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        weights, decay = jnp.exp(scores - shift[..., None]), jnp.exp(top - shift)
        values = jnp.where(is_written[:, None, :, None], part[:, 1], 0)
        new = jnp.einsum(
            "bkgtc,bkcd->bkgtd",
            weights.astype(kv.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * decay + jnp.sum(weights, axis=-1), out * decay[..., None] + new

    if sinks is None:
        top, total = jnp.full((B, K, G, T), -jnp.inf), jnp.zeros((B, K, G, T))
    else:
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, G, 1), (B, K, G, T))
        total = jnp.ones((B, K, G, T))
    num_slices = -(-jnp.max(kv_lens) // width)
    start = (top, total, jnp.zeros((B, K, G, T, D)))
    _, total, out = jax.lax.fori_loop(0, num_slices, attend, start)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    return jnp.where(is_query[:, :, None, None], out, 0).astype(q.dtype)
