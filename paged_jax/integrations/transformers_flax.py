"""The Flax models of Hugging Face transformers 4.x over our cache, their source untouched.

While the model's own module runs, its attention modules are intercepted: their projections and
rotary embeddings stay theirs, and what they made goes to ``cache.attend`` instead of through masks
and a cache of their own. ``docs/integrations_zoos.md`` tells how to use it, and its limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paged_jax.baselines.lockstep import Baseline, lockstep_baseline
from paged_jax.config import ModelSpec, require
from paged_jax.model import Model, Tokenizer

Attend = Callable[[Array, Array, Array], Array]


def _projected_attention(
    module: Any,
    attend: Attend,
    hidden_states: Float[Array, "B T C"],
    *,
    position_ids: Array,
    **_: Any,
) -> tuple[Array]:
    """Llama, Mistral and Gemma: rotary embeddings, grouped heads."""
    q = module._split_heads(module.q_proj(hidden_states), module.num_heads)
    k = module._split_heads(module.k_proj(hidden_states), module.num_key_value_heads)
    v = module._split_heads(module.v_proj(hidden_states), module.num_key_value_heads)
    k, q = module.rotary_emb(k, q, position_ids)
    return (module.o_proj(module._merge_heads(attend(q, k, v))),)


def _gpt2_attention(
    module: Any, attend: Attend, hidden_states: Float[Array, "B T C"], **_: Any
) -> tuple[Array]:
    fused = jnp.split(module.c_attn(hidden_states), 3, axis=2)
    q, k, v = (module._split_heads(part) for part in fused)
    return (module.c_proj(module._merge_heads(attend(q, k, v))),)


def _opt_attention(
    module: Any, attend: Attend, hidden_states: Float[Array, "B T C"], **_: Any
) -> tuple[Array, None]:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (module._split_heads(project(hidden_states)) for project in projections)
    return module.out_proj(module._merge_heads(attend(q, k, v))), None


_ATTENTION = {
    "gemma": _projected_attention,
    "gpt2": _gpt2_attention,
    "llama": _projected_attention,
    "mistral": _projected_attention,
    "opt": _opt_attention,
}
# What the five families call the attention of a layer. Its parent's name is the layer's number.
_ATTENTION_NAMES = ("attn", "self_attn")


def spec_from_config(config: Any) -> ModelSpec:
    """Return what the pool needs to know of a transformers config.

    Args:
      config: a ``LlamaConfig``, ``GPT2Config``, ``OPTConfig``, ``MistralConfig`` or
        ``GemmaConfig``.

    Raises:
      ValueError: another family, or a Mistral without a window.
    """
    family = config.model_type
    require(
        family in _ATTENTION,
        f"config.model_type={family!r} must be one of {', '.join(map(repr, _ATTENTION))}",
    )
    window = None
    if family == "mistral":
        require(
            config.sliding_window is not None,
            "config.sliding_window=None must be a number of tokens: without one the mask of "
            "FlaxMistralForCausalLM shows each token only itself. For all tokens set it to "
            f"config.max_position_embeddings={config.max_position_embeddings}",
        )
        # Its mask keeps sliding_window tokens before the query, and the query's own.
        window = config.sliding_window + 1
    num_heads = config.num_attention_heads
    is_gemma = family == "gemma"  # The others' modules go by the hidden size, whatever head_dim.
    return ModelSpec(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", num_heads),
        head_dim=config.head_dim if is_gemma else config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        window=window,
    )


def as_model(model: Any, params: Any = None, *, tokenizer: Tokenizer | None = None) -> Model:
    """Return the record that the engine takes, for a model with a language-modelling head.

    The head runs at the positions that the engine samples from, and nowhere else.

    Args:
      model: a ``FlaxLlamaForCausalLM``, ``FlaxGPT2LMHeadModel``, ``FlaxOPTForCausalLM``,
        ``FlaxMistralForCausalLM`` or ``FlaxGemmaForCausalLM``.
      params: weights, where they are not the model's own (made with ``_do_init=False``, say).
      tokenizer: or None, when requests bring token ids only.

    Raises:
      ValueError: another model, one without a head, or a Mistral without a window.
    """
    params = model.params if params is None else params
    spec = spec_from_config(model.config)
    prefix = model.base_model_prefix
    require(
        prefix in params,
        f"model={type(model).__name__} must have a language-modelling head, as "
        f"Flax...ForCausalLM have: its weights have no {prefix!r}, only {sorted(params)}",
    )
    attention, module = _ATTENTION[model.config.model_type], model.module

    def apply(
        params: Any, tokens: Array, positions: Array, cache: Any, /, *, logits_at: Array
    ) -> tuple[Array, Any]:
        def intercept(
            run: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            path = context.module.path
            if context.method_name != "__call__" or not path:
                return run(*args, **kwargs)
            if path == (prefix,):
                hidden, *rest = run(*args, **kwargs)
                return jnp.take_along_axis(hidden, logits_at[..., None], axis=1), *rest
            if path[-1] not in _ATTENTION_NAMES:
                return run(*args, **kwargs)

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal cache
                out, cache = cache.attend(int(path[-2]), q, k, v, window=spec.window)
                return out

            return attention(context.module, attend, *args, **kwargs)

        with nn.intercept_methods(intercept):
            logits, *_ = module.apply(
                {"params": params},
                input_ids=tokens,
                attention_mask=None,
                position_ids=positions,
                return_dict=False,
            )
        return logits, cache

    return Model(
        apply=apply,
        params=params,
        spec=spec,
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(model),
        name=model.config.name_or_path or model.config.model_type,
    )


def own_decoding(model: Any, params: Any = None) -> Baseline:
    """Return the model's own greedy decoding over its ``past_key_values``, for ``compare``.

    Args:
      model: as for ``as_model``.
      params: likewise.
    """
    params = model.params if params is None else params

    def init_cache(num_rows: int, capacity: int) -> Any:
        return model.init_cache(num_rows, capacity)

    def step(cache: Any, tokens: Array, position: Array) -> tuple[Array, Any]:
        num_rows = tokens.shape[0]
        keys = next(leaf for leaf in jax.tree.leaves(cache) if leaf.ndim == 4)  # [B, capacity, ...]
        out = model(
            tokens,
            jnp.ones((num_rows, keys.shape[1]), jnp.int32),
            jnp.broadcast_to(position, tokens.shape),
            params=params,
            past_key_values=cache,
        )
        return out.logits[:, 0], out.past_key_values

    return lockstep_baseline(init_cache, step)


def _end_tokens(model: Any) -> tuple[int, ...]:
    """What ends a text for the model's own ``generate``, out of its vocabulary."""
    given = model.generation_config.eos_token_id
    ids = given if isinstance(given, list) else [given]
    # A small vocabulary under a family's default config has no such token: nothing to end on.
    return tuple(i for i in ids if i is not None and i < model.config.vocab_size)
