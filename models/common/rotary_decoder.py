"""What decoders with rotary positions have around their layers."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.common.layers import (
    EMBEDDING_INIT,
    RMSNorm,
    embed,
    output_head,
    scan_layers,
    take_positions,
)
from models.common.rope import angles_of
from paged_jax.cache import KVCache

# More keys than any context has: what a layer without a window says where others have one.
_ALL_KEYS = 2**30

Carry = tuple[Float[Array, "B T C"], KVCache]


class RotaryDecoder(nn.Module):
    """Embedding, layers, norm and output head; families say what a layer is.

    Attributes:
      config: the geometry, with ``frequencies`` and ``rms_norm_eps``.
      dtype: of activations and products; norms, rotations, scores and logits are float32.
      param_dtype: of the weights; None means ``dtype``.
      unroll: each layer has weights of its own, ``layers_0`` and on; else they are stacked and
        scanned, as ``layers``.
      block: ``block(config, param_dtype, window)(carry, layer, window, cos, sin, *shared)``; the
        window is the attribute where all layers have the same, the argument where they differ.
      norm_offset: added to the final norm's weight.
    """

    block: ClassVar[type[nn.Module]]
    norm_offset: ClassVar[float] = 0.0

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = None
    unroll: bool = False

    def scaled(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """What the first layer gets of the embeddings; some families scale them."""
        return x

    def capped(self, logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        """What the output head's logits become; some families bound them."""
        return logits

    def shared(self) -> tuple[Any, ...]:
        """What all layers get beside the rotations."""
        return ()

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
        embedding = self.param("embedding", EMBEDDING_INIT, table, param_dtype)
        x = self.scaled(embed(embedding, tokens, self.dtype))
        angles = angles_of(positions, config.frequencies)
        shared = (jnp.cos(angles), jnp.sin(angles), *self.shared())
        run = self._unrolled if self.unroll else self._scanned
        x, cache = run((x, cache), shared)
        x = take_positions(x, logits_at)
        x = RMSNorm(config.rms_norm_eps, param_dtype, self.norm_offset, name="final_norm")(x)
        head = embedding
        if not config.tie_embeddings:
            head = self.param("head", EMBEDDING_INIT, table, param_dtype)
        return self.capped(output_head(x, head)), cache

    def _scanned(self, carry: Carry, shared: tuple[Any, ...]) -> Carry:
        """Run all layers as one, over stacked weights."""
        config, param_dtype = self.config, self.param_dtype or self.dtype
        scanned = scan_layers(
            self.block, num_layers=config.num_layers, num_scanned=2, num_broadcast=len(shared)
        )
        same = len(set(config.windows)) == 1
        layers = scanned(config, param_dtype, config.windows[0] if same else None, name="layers")  # pyright: ignore[reportCallIssue]
        windows = None if same else jnp.asarray([w or _ALL_KEYS for w in config.windows])
        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        return layers(carry, indices, windows, *shared)[0]

    def _unrolled(self, carry: Carry, shared: tuple[Any, ...]) -> Carry:
        """Run one layer after the other, each with weights and a window of its own."""
        config, param_dtype = self.config, self.param_dtype or self.dtype
        for layer, window in enumerate(config.windows):
            block = self.block(config, param_dtype, window, name=f"layers_{layer}")  # pyright: ignore[reportCallIssue]
            carry, _ = block(carry, layer, None, *shared)  # pyright: ignore[reportCallIssue]
        return carry
