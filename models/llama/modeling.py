"""Llama-family decoders (arXiv:2302.13971, arXiv:2407.21783) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.llama.config import LlamaConfig
from paged_jax.cache import KVCache
from paged_jax.model import Model, Tokenizer

# Fewest rows of the output head in 16-bit types. XLA on CPU multiplies one to seven bf16 rows off
# its fast path: SmolLM2's head took 30 ms at 1 row and 4 ms at 8.
_MIN_HEAD_ROWS = 8


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the rotary frequencies in radians a token, float32 ``[D/2]``.

    With Llama 3's scaling, a frequency that turns n times over the original context is kept for
    n >= high_freq_factor, divided by factor for n <= low_freq_factor, and interpolated between.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    turns = scaling.original_max_position * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T D/2"], sin: Float[Array, "B T D/2"]
) -> Float[Array, "B T H D"]:
    """Rotate channels (i, i + D/2) of every head by the angle of i, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class RMSNorm(nn.Module):
    """Division by the root mean square, computed in float32 (arXiv:1910.07467)."""

    epsilon: float
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*rows C"]) -> Float[Array, "*rows C"]:
        """Normalise the last axis."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon) * weight.astype(jnp.float32)
        return normed.astype(x.dtype)


class Projection(nn.Module):
    """``x @ weight`` without bias.

    The weight is ``[in, out]``, q/k/v and gate/up are fused. Measured on 2 Zen 4 cores (AVX-512),
    30 SmolLM2 layers in a scan, float32, milliseconds at 16, 24, 32, 64 rows: 34, 44, 55, 95
    against 43, 52, 64, 96 with ``[out, in]``; in bf16 the two are within 5 %. Fusing gains 3 to
    10 % up to 32 rows, and nothing at 512.
    """

    features: int
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        """Project the last axis."""
        shape = (x.shape[-1], self.features)
        weight = self.param("weight", nn.initializers.lecun_normal(), shape, self.param_dtype)
        return jnp.einsum("bti,io->bto", x, weight.astype(x.dtype))


class Block(nn.Module):
    """One decoder layer; its signature is that of a scan's body."""

    config: LlamaConfig
    param_dtype: Any

    def setup(self) -> None:
        """Declare the weights."""
        config, dtype = self.config, self.param_dtype
        num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.attn_norm = RMSNorm(config.rms_norm_eps, dtype)
        self.qkv = Projection(num_qkv_heads * config.head_dim, dtype)
        self.out = Projection(config.hidden_size, dtype)
        self.mlp_norm = RMSNorm(config.rms_norm_eps, dtype)
        self.gate_up = Projection(2 * config.intermediate_size, dtype)
        self.down = Projection(config.hidden_size, dtype)

    def __call__(
        self,
        carry: tuple[Float[Array, "B T C"], KVCache],
        layer: Int[Array, ""],
        cos: Float[Array, "B T D/2"],
        sin: Float[Array, "B T D/2"],
    ) -> tuple[tuple[Float[Array, "B T C"], KVCache], None]:
        """Run the layer on the residual stream and the cache."""
        x, cache = carry
        config = self.config
        num_rows, num_new, _ = x.shape
        heads = self.qkv(self.attn_norm(x)).reshape(num_rows, num_new, -1, config.head_dim)
        num_keys_end = config.num_heads + config.num_kv_heads
        q, k, v = jnp.split(heads, [config.num_heads, num_keys_end], axis=2)
        attended, cache = cache.attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(attended.reshape(num_rows, num_new, -1))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return (x + self.down(nn.silu(gate) * up), cache), None


class Llama(nn.Module):
    """A Llama-family decoder.

    Attributes:
      config: the geometry.
      dtype: of activations and products; norms, rotations, scores and logits are float32.
      param_dtype: of the weights; None means ``dtype``.
    """

    config: LlamaConfig
    dtype: Any = jnp.float32
    param_dtype: Any = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        *,
        logits_at: Int[Array, "B N"],
    ) -> tuple[Float[Array, "B N V"], KVCache]:
        """Run all layers, and the output head at the named positions only.

        Args:
          tokens: token ids; padding may hold any id.
          positions: position of each token in its sequence.
          cache: where the keys and values go.
          logits_at: for each row, indices into T.

        Returns:
          Logits in float32 and the cache with the new entries.
        """
        config, param_dtype = self.config, self.param_dtype or self.dtype
        table = (config.vocab_size, config.hidden_size)
        init = nn.initializers.normal(0.02)
        embedding = self.param("embedding", init, table, param_dtype)
        x = embedding.at[tokens].get(mode="clip").astype(self.dtype)
        angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)  # [B, T, D/2]
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=config.num_layers,
        )(config, param_dtype, name="layers")
        # The cache is carried whole: as scanned input and output it would be copied every step.
        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, cache), _ = layers((x, cache), indices, jnp.cos(angles), jnp.sin(angles))
        x = jnp.take_along_axis(x, logits_at[..., None], axis=1)  # [B, N, C]
        x = RMSNorm(config.rms_norm_eps, param_dtype, name="final_norm")(x)
        head = embedding if config.tie_embeddings else self.param("head", init, table, param_dtype)
        return _output_head(x, head.astype(self.dtype)), cache


def _output_head(x: Float[Array, "B N C"], head: Float[Array, "V C"]) -> Float[Array, "B N V"]:
    num_rows, num_at, width = x.shape
    rows = x.reshape(-1, width)
    missing = _MIN_HEAD_ROWS - rows.shape[0]
    if rows.dtype.itemsize == 2 and missing > 0:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
    logits = jnp.einsum("rc,vc->rv", rows, head, preferred_element_type=jnp.float32)
    return logits[: num_rows * num_at].reshape(num_rows, num_at, -1)


def as_model(
    config: LlamaConfig,
    params: Any,
    *,
    dtype: Any = jnp.float32,
    name: str = "llama",
    tokenizer: Tokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> Model:
    """Return the record that the engine takes.

    Args:
      config: the geometry.
      params: the weights (``param_shapes`` says of which shapes).
      dtype: of activations and products; the weights keep theirs.
      name: see ``Model``, as for the rest.
      tokenizer: likewise.
      eos_token_ids: likewise.
    """
    module = Llama(config, jnp.dtype(dtype))

    def apply(
        params: Any, tokens: Array, positions: Array, cache: Any, /, *, logits_at: Array
    ) -> tuple[Array, Any]:
        return module.apply({"params": params}, tokens, positions, cache, logits_at=logits_at)  # pyright: ignore[reportReturnType]

    return Model(
        apply=apply,
        params=params,
        spec=config.spec,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name=name,
    )
