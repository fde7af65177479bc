"""What the attention benchmarks time: the paged step and three dense forms of it, each in place.

The dense caches are head-major, [B, K, C, D].
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.arg_specs import HeadShape
from pallas_kernels.paged_attention.tiles import MAX_TILE_BYTES

DENSE_CHUNK = 256
NEW_TOKEN_SCALE = 0.1  # keys are the layer's own input: a small score keeps rounding small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One measured shape; every row has `context` tokens, the new one included."""

    heads: HeadShape
    batch: int
    context: int
    dtype: str
    block_size: int
    layers: int
    width_factor: int = 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of all layers."""
        per_token = 2 * self.heads.num_kv_heads * self.heads.head_dim
        tokens = self.layers * self.batch * self.context
        return tokens * per_token * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(slots=True)
class Form:
    """A way to run the step: `run(cache, x) -> (x, cache)`; the cache is used up each time."""

    run: Callable[[Any, Any], tuple[Any, Any]]
    cache: Any
    alias_bytes: int
    temp_bytes: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self, x: jax.Array) -> jax.Array:
        """Run once and record the time."""
        start = time.perf_counter()
        out, self.cache = self.run(self.cache, x)
        out.block_until_ready()
        self.seconds.append(time.perf_counter() - start)
        return out


def _dense_write(cache: jax.Array, new: jax.Array, at: int) -> jax.Array:
    """Write [B, K, D] at a position of [B, K, C, D]."""
    return jax.lax.dynamic_update_slice(cache, new[:, :, None], (0, 0, at, 0))


def _dense_layer(k, v, x, length) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the new token at the last position, attend to `length` positions; x is [B, H, D]."""
    B, K, C, D = k.shape
    H = x.shape[1]
    new = NEW_TOKEN_SCALE * x[:, :K]
    k, v = _dense_write(k, new, C - 1), _dense_write(v, new, C - 1)
    q = x.reshape(B, K, H // K, D)
    score = jnp.einsum("bkgd,bkcd->bkgc", q, k, preferred_element_type=jnp.float32)
    mask = jnp.arange(C) < length[:, None, None, None]
    weight = jax.nn.softmax(jnp.where(mask, score * D**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "bkgc,bkcd->bkgd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return x + out.reshape(B, H, D).astype(x.dtype), k, v


def _dense_scan(cache, x, length):
    """Layers scanned, the stacked cache in the carry, attended to in slices of positions."""
    L, _, B, K, C, D = cache.shape
    H, chunk = x.shape[1], math.gcd(C, min(DENSE_CHUNK, L * C // 32))  # under 4 % of the cache

    def layer(carry, index):
        cache, x = carry
        new = jnp.stack([NEW_TOKEN_SCALE * x[:, :K]] * 2)[None, :, :, :, None]
        cache = jax.lax.dynamic_update_slice(cache, new, (index, 0, 0, 0, C - 1, 0))
        q = x.reshape(B, K, H // K, D)

        def attend(i, sums):
            top, weight, value = sums
            at = (index, 0, 0, 0, i * chunk, 0)
            k, v = jax.lax.dynamic_slice(cache, at, (1, 2, B, K, chunk, D))[0]
            score = jnp.einsum("bkgd,bkcd->bkgc", q, k, preferred_element_type=jnp.float32)
            mask = i * chunk + jnp.arange(chunk) < length[:, None, None, None]
            score = jnp.where(mask, score * D**-0.5, -jnp.inf)
            new_top = jnp.maximum(top, score.max(-1))
            p, decay = jnp.exp(score - new_top[..., None]), jnp.exp(top - new_top)
            part = jnp.einsum(
                "bkgc,bkcd->bkgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return new_top, weight * decay + p.sum(-1), value * decay[..., None] + part

        zeros = jnp.zeros((B, K, H // K))
        start = (zeros - 1e30, zeros, jnp.zeros(q.shape))
        _, weight, value = jax.lax.fori_loop(0, C // chunk, attend, start)
        out = (value / weight[..., None]).reshape(B, H, D)
        return (cache, x + out.astype(x.dtype)), None

    (cache, x), _ = jax.lax.scan(layer, (cache, x), jnp.arange(L, dtype=jnp.int32))
    return x, cache


def _dense_unrolled(layers, x, length):
    """Layers unrolled in one jit, an array a layer for K and for V."""
    written = []
    for k, v in layers:
        x, k, v = _dense_layer(k, v, x, length)
        written.append((k, v))
    return x, written


def _paged_scan(kv_blocks, x, tables, length, slots, *, layers):
    """Layers scanned, the pool in the carry: the step that the library runs."""
    N, _, K, S, _ = kv_blocks.shape
    ones = jnp.ones_like(length)

    def layer(carry, index):
        kv_blocks, x = carry
        first = index * (N // layers)
        new = NEW_TOKEN_SCALE * x[:, :, :K]
        kv_blocks = kv_write(kv_blocks, new, new, slots + first * S, ones, backend="xla")
        out = paged_attention(x, kv_blocks, tables + first, length, ones, backend="xla")
        return (kv_blocks, x + out), None

    (kv_blocks, x), _ = jax.lax.scan(layer, (kv_blocks, x), jnp.arange(layers, dtype=jnp.int32))
    return x, kv_blocks


def _compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, int, int]:
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled, memory.alias_size_in_bytes, memory.temp_size_in_bytes


def paged_form(shape: Shape, kv: np.ndarray) -> Form:
    """The paged step over a pool that holds `kv` [L, 2, B, K, C, D] in shuffled blocks."""
    L, _, B, K, C, D = kv.shape
    S = shape.block_size
    M = -(-C // S)
    P = B * M + 1
    tables = np.random.default_rng(0).permutation(P - 1).astype(np.int32).reshape(B, M) + 1
    pool = np.zeros((L, P, 2, K, S, D), kv.dtype)
    padded = np.pad(kv, [(0, 0)] * 4 + [(0, M * S - C), (0, 0)])
    blocks = padded.reshape(L, 2, B, K, M, S, D).transpose(0, 2, 4, 1, 3, 5, 6)
    pool[:, tables.reshape(-1)] = blocks.reshape(L, B * M, 2, K, S, D)
    slots = jnp.asarray(tables[:, -1:] * S + (C - 1) % S)
    tables = jnp.asarray(np.pad(tables, ((0, 0), (0, M * (shape.width_factor - 1)))))
    length = jnp.full(B, C, jnp.int32)
    cache = jnp.asarray(pool.reshape(L * P, 2, K, S, D))
    x = jax.ShapeDtypeStruct((B, 1, shape.heads.num_heads, D), cache.dtype)
    step = functools.partial(_paged_scan, layers=L)
    compiled, alias, temp = _compiled(step, cache, x, tables, length, slots)

    def run(cache, x):
        x, cache = compiled(cache, x[:, None], tables, length, slots)
        return x[:, 0], cache

    return Form(run=run, cache=cache, alias_bytes=alias, temp_bytes=temp)


def dense_forms(shape: Shape, kv: np.ndarray) -> dict[str, Form]:
    """Three ways to run the same step on a contiguous cache, each in place."""
    L, _, B, _, C, D = kv.shape
    length = jnp.full(B, C, jnp.int32)
    x = jax.ShapeDtypeStruct((B, shape.heads.num_heads, D), kv.dtype)

    stacked = jnp.asarray(kv)
    scan, alias, temp = _compiled(_dense_scan, stacked, x, length)
    forms = {"scan": Form(lambda cache, x: scan(cache, x, length), stacked, alias, temp)}

    layers = [(jnp.asarray(k), jnp.asarray(v)) for k, v in kv]
    unrolled, alias, temp = _compiled(_dense_unrolled, layers, x, length)
    forms["unrolled"] = Form(lambda cache, x: unrolled(cache, x, length), layers, alias, temp)

    layers = [(jnp.asarray(k), jnp.asarray(v)) for k, v in kv]
    one, alias, temp = _compiled(_dense_unrolled, layers[:1], x, length)

    def layerwise(cache, x):
        written = []
        for layer in cache:
            x, (layer,) = one([layer], x, length)
            written.append(layer)
        return x, written

    # One call's temporaries live at a time; each call aliases one layer.
    forms["jit a layer"] = Form(layerwise, layers, alias * L, temp)
    return forms


def check_in_place(name: str, form: Form, cache_bytes: int, *, temp_bytes: float = 0) -> None:
    """Raise RuntimeError unless the form's cache is updated in place, with temporaries under 5 %
    of it or under `temp_bytes`.
    """
    limit = max(0.05 * cache_bytes, temp_bytes)
    if form.alias_bytes < cache_bytes or form.temp_bytes >= limit:
        raise RuntimeError(
            f"{name}: alias {form.alias_bytes}, temp {form.temp_bytes}; "
            f"must be at least {cache_bytes} and under {limit:.0f}"
        )


def random_inputs(shape: Shape) -> tuple[np.ndarray, jax.Array]:
    """Keys and values [L, 2, B, K, C, D] and an input [B, H, D] of a shape."""
    heads, dtype = shape.heads, jnp.dtype(shape.dtype)
    size = (shape.layers, 2, shape.batch, heads.num_kv_heads, shape.context, heads.head_dim)
    rng = np.random.default_rng(0)
    kv = rng.standard_normal(size, np.float32).astype(dtype)
    x = rng.standard_normal((shape.batch, heads.num_heads, heads.head_dim), np.float32)
    return kv, jnp.asarray(x.astype(dtype))


def timed_forms(shape: Shape, *, pairs: int, check: bool = True) -> dict[str, Form]:
    """The paged form and all dense ones, each run ``pairs`` times in turns.

    Raises:
      RuntimeError: a form copies its cache, unless ``check`` is False.
    """
    kv, x = random_inputs(shape)
    forms = {"paged": paged_form(shape, kv), **dense_forms(shape, kv)}
    del kv
    results = {name: np.asarray(form.step(x), np.float32) for name, form in forms.items()}
    for name, form in forms.items():
        if check:
            # A tile's size is fixed, so in a small pool its share is larger.
            tile = 2 * MAX_TILE_BYTES if name == "paged" else 0
            check_in_place(name, form, shape.cache_bytes, temp_bytes=tile)
        atol = 1e-3 if shape.dtype == "float32" else 0.1
        np.testing.assert_allclose(results[name], results["jit a layer"], atol=atol, rtol=atol)
        form.seconds.clear()
    for _ in range(pairs):
        for form in forms.values():
            form.step(x)
    return forms


def fastest_dense(forms: dict[str, Form]) -> str:
    """The dense form with the least median."""
    dense = [name for name in forms if name != "paged"]
    return min(dense, key=lambda name: float(np.median(forms[name].seconds)))


def ratios_of(form: Form, base: Form) -> list[float]:
    """How many times as long each run took as the base's beside it."""
    return [x / y for x, y in zip(form.seconds, base.seconds, strict=True)]
