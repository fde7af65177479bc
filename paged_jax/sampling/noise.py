"""Counter-based noise: a function of (seed, sample index, output position, token id) only.

Neither the row, the batch, the step nor the sampler's path enters, so a request draws the same
tokens whatever else runs. The bits are those of ``jax.random`` (threefry-2x32, Salmon et al.
2011): the 32 bits of a token are ``jax.random.bits(fold_in(base_key, position), (V,))[token_id]``.
They are computed here for any set of token ids, without the ones between, and unrolled, so that
XLA fuses noise into the pass that uses it (jax's own rolled loop took twice the time on CPU).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
# The largest float32 below 1: the exponential draw stays finite.
_BELOW_ONE = np.float32(1 - 2.0**-24)


def threefry2x32(key0: Any, key1: Any, count0: Any, count1: Any) -> tuple[Any, Any]:
    """Hash two uint32 words under a two-word key; numpy or jax arrays, broadcast."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = count0 + key0, count1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def base_key(seed: int, sample_index: int) -> np.ndarray:
    """The key of one sequence: ``fold_in(key(seed), sample_index)``, on the host.

    Args:
      seed: 0 .. 2^64 - 1, all 64 bits used.
      sample_index: which of the request's samples, from 0.

    Returns:
      uint32[2], raw threefry key data.
    """
    words = np.array([[seed >> 32], [seed & 0xFFFFFFFF], [0], [sample_index]], np.uint32)
    return np.concatenate(threefry2x32(*words))


def position_keys(
    base_keys: UInt32[Array, "B 2"], positions: Int32[Array, " B"]
) -> UInt32[Array, "B 2"]:
    """``fold_in`` of each row's base key with its output position (0 for its first token)."""
    zeros = jnp.zeros(positions.shape, jnp.uint32)
    words = threefry2x32(base_keys[:, 0], base_keys[:, 1], zeros, positions.astype(jnp.uint32))
    return jnp.stack(words, axis=1)


def exponential(
    keys: UInt32[Array, "B 2"], token_ids: Int32[Array, "B N"]
) -> Float32[Array, "B N"]:
    """Exponential(1) draws of some tokens: positive and finite, fine-grained near 0.

    ``argmax(weight / exponential)`` is a draw in proportion to the weights (the Gumbel-max
    method, with one logarithm instead of two). The winner's draw is a small one, so the uniform
    number keeps all 32 bits near 0: ties stay below one in 10^4 even for a flat vocabulary.
    """
    words = threefry2x32(keys[:, :1], keys[:, 1:], np.uint32(0), token_ids.astype(jnp.uint32))
    bits = words[0] ^ words[1]
    uniform = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -jnp.log1p(-jnp.minimum(uniform, _BELOW_ONE))
