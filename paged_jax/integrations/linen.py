"""Flax linen models over our cache, their source untouched (docs/integrations.md).

While the model runs, its attention modules are intercepted: projections, norms and rotations stay
theirs, and what they made of the new tokens goes to the cache instead of through masks and a cache
of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
from flax.core import axes_scan
from jaxtyping import Array, Float

from paged_jax.config import require
from paged_jax.integrations.held_cache import Attention, make_model
from paged_jax.model import Model


def multi_head_attention(
    module: nn.MultiHeadDotProductAttention,
    attend: Callable[[Array, Array, Array], Array],
    *args: Any,
    **kwargs: Any,
) -> Float[Array, "B T C"]:
    """Call Flax's own module, its softmax replaced.

    Its masks are not looked at: the cache is causal. Where they say more (a window), give
    ``as_model`` an ``attention`` that calls this with ``functools.partial(attend, window=8)``.

    Raises:
      ValueError: the module has a cache or an ``attention_fn`` of its own, dropout that is on, or
        keys and values of other inputs than its queries; or weights are to be sown.
    """
    path = "/".join(module.path)
    require(not module.decode, f"{path}: decode=True must be False: the cache is the engine's")
    require(
        module.attention_fn is nn.dot_product_attention,
        f"{path}: attention_fn={module.attention_fn!r} must be flax.linen.dot_product_attention: "
        "what another one computes would be lost; give as_model an attention for the module",
    )
    inputs = [*args, *(kwargs.get(name) for name in ("inputs_k", "inputs_v", "inputs_kv"))]
    first = kwargs.get("inputs_q", args[0] if args else None)
    require(
        all(x is None or x is first for x in inputs),
        f"{path}: inputs_k and inputs_v must be inputs_q itself: only causal self-attention has a "
        "paged cache",
    )
    require(not kwargs.get("sow_weights"), f"{path}: sow_weights=True must be False: no weights")

    def attention_fn(query: Array, key: Array, value: Array, *, deterministic: bool) -> Array:
        require(deterministic, f"{path}: deterministic=False must be True: dropout is on")
        return attend(query, key, value)

    # The copy takes the place of the original, which has not run: it makes the same submodules.
    return module.clone(parent=module.scope, attention_fn=attention_fn)(*args, **kwargs)


ATTENTION: dict[type, Attention] = {nn.MultiHeadDotProductAttention: multi_head_attention}


def as_model(
    forward: Callable[[Any, Array, Array], Array],
    params: Any,
    *,
    max_position: int,
    attention: Mapping[type, Attention] | None = None,
    has_positions: bool = True,
    **fields: Any,
) -> Model:
    """Make a ``Model`` of a linen model that attends causally.

    The geometry and the layers are found by tracing ``forward`` once: layers are numbered as they
    run, by module path; under ``nn.scan``, where all have one path, while they run.

    Args:
      forward: ``forward(params, tokens [B, T], positions [B, T]) -> logits [B, T, V]``, the
        model's call without a cache, deterministic.
      params: what ``forward`` takes, any pytree.
      max_position: longest context in tokens.
      attention: for classes of attention modules, what replaces ``__call__``:
        ``f(module, attend, *args, **kwargs)`` returns what the class does, and calls
        ``attend(q, k, v)`` once (see ``held_cache.Attend``). Flax's
        ``MultiHeadDotProductAttention`` and what derives from it are known.
      has_positions: False for a model without position embeddings, which ``forward`` cannot tell.
      **fields: of ``Model``: ``tokenizer``, ``eos_token_ids``, ``name``.

    Raises:
      ValueError: ``forward`` runs no attention, or such as has no paged cache; see
        ``multi_head_attention``.
    """
    replacements = {**ATTENTION, **(attention or {})}

    def run(params: Any, tokens: Array, positions: Array, attend_at: Any) -> Array:
        active: list[nn.Module] = []

        def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            replace = _replacement(replacements, type(module))
            if replace is None or context.method_name != "__call__" or active:
                return next_fun(*args, **kwargs)
            active.append(module)
            try:
                return replace(module, attend_at("/".join(module.path)), *args, **kwargs)
            finally:
                active.pop()

        with nn.intercept_methods(intercept), _scans_with_effects():
            return forward(params, tokens, positions)

    return make_model(run, params, max_position=max_position, has_positions=has_positions, **fields)


def _replacement(replacements: Mapping[type, Attention], cls: type) -> Attention | None:
    return next((replacements[base] for base in cls.__mro__ if base in replacements), None)


@contextlib.contextmanager
def _scans_with_effects() -> Iterator[None]:
    """Let ``nn.scan`` trace bodies that write to a cache which it does not know.

    Unless it is told ``check_constancy_invariants=False``, it refuses them: the write looks like a
    broadcast variable that depends on the layer. Other threads that trace a scan meanwhile lose
    that check, and nothing else.
    """
    original = axes_scan.scan

    def unchecked(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "check_constancy_invariants": False})

    axes_scan.scan = functools.wraps(original)(unchecked)
    try:
        yield
    finally:
        axes_scan.scan = original
