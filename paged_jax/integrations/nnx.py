"""Flax nnx models over our cache, their source untouched (docs/integrations.md).

For a step the model is merged anew from its state, and in that copy the attention modules are told
to attend to the cache: projections, norms and rotations stay theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from paged_jax.config import require
from paged_jax.integrations.held_cache import Attend, Attention, make_model
from paged_jax.model import Model


def as_model(
    module: nnx.Module,
    forward: Callable[[Any, Array, Array], Array],
    *,
    max_position: int,
    attention: Mapping[type, Attention] | None = None,
    has_positions: bool = True,
    **fields: Any,
) -> Model:
    """Make a ``Model`` of an nnx model that attends causally.

    The geometry and the layers are found by tracing ``forward`` once: layers are numbered as they
    run, by module path; under ``nnx.scan``, where all have one path, while they run.

    Args:
      module: the model with its weights; it is left as it is.
      forward: ``forward(module, tokens [B, T], positions [B, T]) -> logits [B, T, V]``, the
        model's call without a cache, deterministic.
      max_position: longest context in tokens.
      attention: for classes of attention modules, what replaces ``__call__``:
        ``f(module, attend, *args, **kwargs)`` returns what the class does, and calls
        ``attend(q, k, v)`` once (see ``held_cache.Attend``). ``nnx.MultiHeadAttention`` needs
        none: its ``attention_fn`` is replaced, and the rotations of
        ``nnx.dot_product_attention_with_rope`` are kept.
      has_positions: False for a model without position embeddings, which ``forward`` cannot tell.
      **fields: of ``Model``: ``tokenizer``, ``eos_token_ids``, ``name``.

    Raises:
      ValueError: ``forward`` runs no attention, or such as has no paged cache: decode=True, an
        ``attention_fn`` of its own, dropout that is on, keys and values of other tokens.
    """
    graph, state = nnx.split(module)
    replacements = dict(attention or {})

    def run(state: Any, tokens: Array, positions: Array, attend_at: Any) -> Array:
        copy = nnx.merge(graph, state, copy=True)  # variables belong to the trace that made them
        for path, node in list(nnx.iter_graph(copy)):
            attend = functools.partial(attend_at, "/".join(map(str, path)))
            replace = next((replacements[c] for c in type(node).__mro__ if c in replacements), None)
            if replace is not None:
                node.__class__ = _hooked(type(node))
                node.paged_jax_call = functools.partial(_call, replace, attend())
            elif isinstance(node, nnx.MultiHeadAttention):
                node.attention_fn = _attention_fn(node, attend())
        return forward(copy, tokens, positions)

    return make_model(run, state, max_position=max_position, has_positions=has_positions, **fields)


def _call(replace: Attention, attend: Attend, module: Any, *args: Any, **kwargs: Any) -> Any:
    return replace(module, attend, *args, **kwargs)


@functools.cache
def _hooked(cls: type) -> type:
    """A class like ``cls`` whose instances say themselves what calling them does."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.paged_jax_call(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _attention_fn(module: nnx.MultiHeadAttention, attend: Attend) -> Callable[..., Array]:
    """What ``nnx.MultiHeadAttention`` calls with its projections."""
    path, own = attend.path, module.attention_fn
    rope = None
    if isinstance(own, functools.partial) and own.func is nnx.dot_product_attention_with_rope:
        rope = own.keywords.get("rope")
    require(
        own is nnx.dot_product_attention or rope is not None,
        f"{path}: attention_fn={own!r} must be nnx.dot_product_attention, or _with_rope: what "
        "another one computes would be lost; give as_model an attention for the module",
    )

    def attention_fn(query: Array, key: Array, value: Array, **options: Any) -> Array:
        require(not module.decode, f"{path}: decode=True must be False: the cache is the engine's")
        require(
            options["deterministic"],
            f"{path}: deterministic=False must be True: dropout is on",
        )
        require(options["module"] is None, f"{path}: sow_weights=True must be False: no weights")
        if rope is not None:
            query, key = (_rotated(rope, x, attend.positions) for x in (query, key))
        return attend(query, key, value)

    return attention_fn


def _rotated(rope: Any, x: Array, positions: Array) -> Array:
    """Rotate each row's heads by its own positions: the module's call takes one row's."""
    heads = jax.vmap(rope, in_axes=(1, None), out_axes=1)  # [T, H, D], [T]
    return jax.vmap(heads)(x, positions)
