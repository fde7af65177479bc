"""A cache inside somebody else's model: found by one abstract run, updated through JAX references.

``linen`` and ``nnx`` hook the attention modules of a model; what the hooks call is here. The pool
lives in a mutable array (``jax.new_ref``) while the model runs, so that it passes through scans,
remats and jits which know nothing of it: JAX turns it into a carried value of each, in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float, Int

from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.config import ModelSpec, require
from paged_jax.model import Model

_PROBE = "paged_jax_attention_probe"


class Cache(Protocol):
    """What attends on behalf of an attention module: a pool, or the search for the modules."""

    def attend(self, path: str, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store the new keys and values of the module at ``path``, then attend to all of them."""
        ...


@dataclasses.dataclass(frozen=True)
class Attend:
    """What an attention module calls instead of its own softmax.

    Attributes:
      path: of the module, its parts joined by slashes.
      positions: of the tokens in their sequences, for rotary embeddings.
      cache: where the keys and values go.
    """

    path: str
    positions: Int[Array, "B T"]
    cache: Cache

    def __call__(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        **options: Any,
    ) -> Float[Array, "B T H D"]:
        """Attend causally, to the cache and the new tokens.

        Args:
          q: queries, rotated where the model rotates them.
          k: new keys, likewise; K may be less than H (grouped queries).
          v: new values.
          **options: those of ``KVCache.attend`` (``scale``, ``window``, ``soft_cap``, ...).

        Raises:
          ValueError: the shapes are not those of causal self-attention.
        """
        require(
            q.ndim == 4 and k.shape == v.shape and k.shape[:2] == q.shape[:2],
            f"{self.path or 'the attention module'}: q {q.shape}, k {k.shape} and v {v.shape} must "
            "be [B, T, H or K, D] of the same tokens: only causal self-attention has a paged cache",
        )
        return self.cache.attend(self.path, q, k, v, **options)


Attention = Callable[..., Any]
Run = Callable[[Any, Array, Array, Callable[[str], Attend]], Array]


@dataclasses.dataclass(frozen=True)
class _Sites:
    """A model's attention modules: the layer of each path (none where paths repeat), the shape."""

    layers: Mapping[str, int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


class _Probe:
    """Attends to nothing, and leaves a mark in the traced program that can be counted."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, int, int]] = {}

    def attend(self, path: str, q: Array, k: Array, v: Array, **options: Any) -> Array:
        del options
        shape = (q.shape[2], k.shape[2], q.shape[3])
        require(
            self.shapes.setdefault(path, shape) == shape,
            f"{path}: (heads, KV heads, head dim) {shape} must be {self.shapes[path]} as before",
        )

        def mark(q: Array, k: Array, v: Array) -> Array:
            return q + 0 * (k[:, :, :1] + v[:, :, :1])

        mark.__name__ = _PROBE
        return jax.jit(mark)(q, k, v)


class _HeldCache:
    """A cache whose pool is updated in place by whatever part of the model attends."""

    def __init__(self, cache: Any, layers: Mapping[str, int]) -> None:
        self._cache, self._layers = cache, layers
        self._pool = jax.tree.map(jax.new_ref, cache.pool)
        self._next_layer = jax.new_ref(jnp.zeros((), jnp.int32))

    def attend(self, path: str, q: Array, k: Array, v: Array, **options: Any) -> Array:
        layer: Any = self._layers.get(path)
        if layer is None:  # one module is several layers: they run in order
            layer = self._next_layer[...]
            self._next_layer[...] = layer + 1
        pool = jax.tree.map(lambda ref: ref[...], self._pool)
        out, cache = _with_pool(self._cache, pool).attend(layer, q, k, v, **options)
        jax.tree.map(_store, self._pool, cache.pool)
        return out

    def release(self) -> Any:
        """The cache as a value again; it cannot be attended to afterwards."""
        return _with_pool(self._cache, jax.tree.map(jax.freeze, self._pool))


def _store(ref: Any, value: Array) -> None:
    ref[...] = value


def _with_pool(cache: Any, pool: Any) -> Any:
    if isinstance(cache, DenseKVCache):
        return dataclasses.replace(cache, kv=pool.blocks)
    assert isinstance(cache, PagedKVCache)
    return dataclasses.replace(cache, pool=pool)


def make_model(
    run: Run, params: Any, *, max_position: int, has_positions: bool = True, **fields: Any
) -> Model:
    """Make a ``Model`` of a function that runs somebody's model with its attention hooked.

    Args:
      run: ``run(params, tokens, positions, attend_at) -> logits [B, T, V]``; for each attention
        module it calls ``attend_at(path)(q, k, v)`` once.
      params: the weights.
      max_position: longest context in tokens.
      has_positions: False for a model that has no positions to be told.
      **fields: of ``Model``.

    Raises:
      ValueError: no attention, or attention of several shapes, or under a condition; or a model
        that does not use the positions it is given.
    """
    sites = _find_sites(run, params, has_positions)

    def apply(
        params: Any, tokens: Array, positions: Array, cache: Any, /, *, logits_at: Array
    ) -> tuple[Array, Any]:
        held = _HeldCache(cache, sites.layers)
        logits = run(
            params, tokens, positions, functools.partial(Attend, positions=positions, cache=held)
        )
        return jnp.take_along_axis(logits, logits_at[..., None], axis=1), held.release()

    spec = ModelSpec(
        num_layers=sites.num_layers,
        num_heads=sites.num_heads,
        num_kv_heads=sites.num_kv_heads,
        head_dim=sites.head_dim,
        vocab_size=sites.vocab_size,
        max_position=max_position,
    )
    return Model(apply=apply, params=params, spec=spec, **fields)


def _find_sites(run: Run, params: Any, has_positions: bool) -> _Sites:
    """Trace the model once, without computing anything."""
    probe = _Probe()

    def traced(positions: Array, tokens: Array, params: Any) -> Array:
        attend_at = functools.partial(Attend, positions=positions, cache=probe)
        return run(params, tokens, positions, attend_at)

    ids = jax.ShapeDtypeStruct((2, 3), jnp.int32)  # B and T that differ from each other
    program, logits = jax.make_jaxpr(traced, return_shape=True)(ids, ids, params)
    require(len(probe.shapes) > 0, "forward ran no attention module that is hooked")
    shapes = set(probe.shapes.values())
    require(
        len(shapes) == 1,
        f"attention modules have (heads, KV heads, head dim) {probe.shapes}: must be alike, since "
        "a block holds all layers",
    )
    outputs: list[tuple[int, ...]] = [x.shape for x in jax.tree.leaves(logits)]
    require(
        len(outputs) == 1 and len(outputs[0]) == 3 and outputs[0][:2] == (2, 3),
        f"forward returned arrays of shapes {outputs} for tokens [2, 3]: must be logits [B, T, V]",
    )
    uses = {id(v) for eqn in program.jaxpr.eqns for v in eqn.invars}
    require(
        not has_positions or id(program.jaxpr.invars[0]) in uses,
        "forward does not use its positions: a model that counts 0, 1, 2, ... itself gives wrong "
        "answers from the second step on; pass them on, or has_positions=False for a model that "
        "has none",
    )
    num_layers = _count_marks(program.jaxpr)
    paths = list(probe.shapes)
    layers = {path: i for i, path in enumerate(paths)} if len(paths) == num_layers else {}
    num_heads, num_kv_heads, head_dim = shapes.pop()
    return _Sites(layers, num_layers, num_heads, num_kv_heads, head_dim, outputs[0][2])


def _count_marks(program: core.Jaxpr) -> int:
    """How often a run of the program attends."""
    total = 0
    for eqn in program.eqns:
        if eqn.params.get("name") == _PROBE:
            total += 1
            continue
        inside = sum(_count_marks(sub) for sub in _sub_programs(eqn))
        require(
            inside == 0 or eqn.primitive.name not in ("cond", "while"),
            f"attention under a {eqn.primitive.name} of its own: each layer must run once a step",
        )
        total += inside * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total


def _sub_programs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
