"""Google DeepMind's ``gemma`` package (Gemma 2 and 3) over our cache, its source untouched.

The model's own blocks run; its attention modules are intercepted: their projections, QK norms and
rotary embeddings stay theirs, and what they made goes to ``cache.attend`` instead of through masks
and a cache of their own. ``docs/integrations_zoos.md`` tells how to use it, and its limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax.baselines.lockstep import Baseline, lockstep_baseline
from paged_jax.config import ModelSpec, require
from paged_jax.model import Model, Tokenizer

RopeFn = Callable[..., Array]


def _window(attn_type: Any, sliding_window_size: int | None) -> int | None:
    """The keys that a layer of this type attends to, the query's own included."""
    return sliding_window_size if attn_type.name == "LOCAL_SLIDING" else None


def spec_from_config(config: Any, *, max_position: int) -> ModelSpec:
    """Return what the pool needs to know of a ``gm.nn.config.TransformerConfig``.

    Args:
      config: of Gemma 2 or 3.
      max_position: longest context in tokens, which the config does not say.
    """
    size = config.sliding_window_size
    windows = [_window(attn_type, size) for attn_type in config.attention_types]
    return ModelSpec(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.num_embed,
        max_position=max_position,
        window=None if None in windows else size,
    )


def _project(
    module: Any, x: Float[Array, "B T C"], positions: Int[Array, "B T"], apply_rope: RopeFn
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Queries (not scaled), keys and values, by an attention module's own parts."""
    if module.use_qkv_einsum:
        q, k, v = module.qkv_einsum("btc,nhcd->nbthd", x)
    else:
        q = module.q_einsum("btc,hcd->bthd", x)
        k, v = module.kv_einsum("btc,nkcd->nbtkd", x)
    if module.use_qk_norm:
        q, k = module._query_norm(q), module._key_norm(k)
    rope = {
        "base_frequency": module.rope_base_frequency,
        "scale_factor": module.rope_scale_factor,
    }
    return apply_rope(q, positions, **rope), apply_rope(k, positions, **rope), v


def as_model(
    model: Any,
    params: Any,
    *,
    max_position: int,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> Model:
    """Return the record that the engine takes, for the text part of a Gemma 2 or 3.

    The head runs at the positions that the engine samples from, and nowhere else.

    Args:
      model: ``gm.nn.Gemma3_270M()`` or a sibling, or a ``gm.nn.Transformer(config=...)``.
      params: its weights, as ``gm.ckpts.load_params`` returns them.
      max_position: longest context in tokens that the weights were made for: the config does not
        say it.
      tokenizer: or None, when requests bring token ids only.
      eos_token_ids: tokens that end a text.

    Raises:
      ValueError: another model (Gemma 3n and 4 have other layers), or no positive number.
    """
    # The package: pyright takes the name for this file's.
    from gemma import gm  # pyright: ignore[reportAttributeAccessIssue]

    require(
        isinstance(getattr(model, "config", None), gm.nn.config.TransformerConfig),
        f"model={type(model).__name__} must be a Gemma 2 or 3: a gm.nn.Transformer whose config is "
        "a gm.nn.config.TransformerConfig",
    )
    spec = spec_from_config(model.config, max_position=max_position)

    def apply(
        params: Any, tokens: Array, positions: Array, cache: Any, /, *, logits_at: Array
    ) -> tuple[Array, Any]:
        def intercept(
            run: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            nonlocal cache
            module = context.module
            if context.method_name != "__call__" or not isinstance(module, gm.nn.Attention):
                return run(*args, **kwargs)
            block, _ = module.path  # ("layer_3", "attn")
            q, k, v = _project(module, args[0], positions, gm.math.apply_rope)
            out, cache = cache.attend(
                int(block.removeprefix("layer_")),
                q,
                k,
                v,
                scale=module.query_pre_attn_scalar,
                window=_window(module.attn_type, module.sliding_window_size),
                soft_cap=module.attn_logits_soft_cap,
            )
            return None, module.attn_vec_einsum("bthd,hdc->btc", out)

        def forward(module: Any) -> Array:
            # Not Transformer.__call__: what runs inside its own jit could not give the cache back,
            # and its head runs everywhere.
            x = module.embedder.encode(tokens)
            for block in module.blocks:
                _, x = block(x, positions, None, None)
            x = jnp.take_along_axis(module.final_norm(x), logits_at[..., None], axis=1)
            logits, soft_cap = module.embedder.decode(x), module.config.final_logit_softcap
            return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)

        with nn.intercept_methods(intercept):
            logits = nn.apply(forward, model)({"params": params})
        return logits, cache

    return Model(
        apply=apply,
        params=params,
        spec=spec,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name=type(model).__name__,
    )


def own_decoding(model: Any, params: Any, *, dtype: Any = jnp.float32) -> Baseline:
    """Return the model's own greedy decoding over its own cache, for ``compare``.

    Args:
      model: as for ``as_model``.
      params: likewise.
      dtype: of the cache.
    """

    def init_cache(num_rows: int, capacity: int) -> Any:
        return model.init_cache(batch_size=num_rows, dtype=dtype, cache_length=capacity)

    def step(cache: Any, tokens: Array, position: Array) -> tuple[Array, Any]:
        keys = next(leaf for leaf in jax.tree.leaves(cache) if leaf.ndim == 4)  # [B, capacity, ...]
        positions = jnp.broadcast_to(position, tokens.shape)
        mask = jnp.arange(keys.shape[1]) <= positions[..., None]  # [B, 1, capacity]
        out = model.apply(
            {"params": params}, tokens, positions=positions, cache=cache, attention_mask=mask
        )
        return out.logits[:, 0], out.cache

    return lockstep_baseline(init_cache, step)
