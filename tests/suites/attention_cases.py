"""Cases for every form of `paged_attention`: seeded arrays, poison, and a float64 answer."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
POOL_DTYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
POOL_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
POISON_ENTRIES = (-1, 2**30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one call; `kv_lens=None` means `ragged_lens(block_size)`.

    With a `kv_dtype` of 8 bits the pool is quantised, a scale a token and head, and the answer is
    that of the dequantised values; scales in slots that must not be read are `garbage` too.
    """

    dtype: str = "float32"
    kv_dtype: str | None = None
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    max_new: int = 1
    kv_lens: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    score_fn: bool = False
    garbage: float = float("nan")
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """One call: `args` and `kwargs` with poison, and the answer without it."""

    args: tuple[np.ndarray, ...]
    kwargs: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray


def ragged_lens(block_size: int, num_blocks: int = 5) -> tuple[int, ...]:
    """Row lengths 0, 1, S-1, S, S+1 and a full table."""
    S = block_size
    return (0, 1, S - 1, S, S + 1, num_blocks * S)


def alibi(score, row, head, q_pos, k_pos):
    """A score function that uses all its arguments."""
    distance = jnp.asarray(q_pos - k_pos, jnp.float32)
    slope = jnp.exp2(-jnp.asarray(head, jnp.float32) - 1.0)
    return score - slope * distance + 0.01 * jnp.asarray(row, jnp.float32)


def quantize(x: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Stored elements and float32 scales, one a vector of the last axis."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(axis=-1) / np.float32(POOL_MAX[kv_dtype])
    stored = x / np.where(scale == 0, 1, scale)[..., None]
    if kv_dtype == "int8":
        stored = np.rint(stored)
    return stored.astype(POOL_DTYPES[kv_dtype]), scale


def make(case: Case) -> Arrays:
    """Draw a pool, shuffled tables and queries; fill all that must not be read with garbage."""
    rng = np.random.default_rng(case.seed)
    S, K, D, H, T = case.block_size, case.num_kv_heads, case.head_dim, case.num_heads, case.max_new
    dtype = DTYPES[case.dtype]
    kv_lens = np.array(case.kv_lens or ragged_lens(S), np.int32)
    q_lens = np.minimum(kv_lens, T if case.q_lens is None else np.array(case.q_lens, np.int32))
    q_lens = q_lens.astype(np.int32)
    B, M = len(kv_lens), max(1, -(-int(kv_lens.max()) // S)) + 1
    N = B * M + 3

    q = rng.normal(size=(B, T, H, D)).astype(dtype)
    clean = rng.normal(size=(N, 2, K, S, D)).astype(dtype)
    tables = (rng.permutation(N - 1)[: B * M] + 1).reshape(B, M).astype(np.int32)
    readable = np.zeros((N, S), bool)
    poisoned = tables.copy()
    for b in range(B):
        first = 0 if case.window is None else max(0, kv_lens[b] - q_lens[b] - case.window + 1)
        for position in range(first, kv_lens[b] if q_lens[b] else 0):
            readable[tables[b, position // S], position % S] = True
        poisoned[b, : first // S] = 0
        poisoned[b, -(-kv_lens[b] // S) :] = POISON_ENTRIES[b % 2]
    mask = readable[:, None, None, :]  # [N, 1, 1, S]
    scales = None
    if case.kv_dtype is None:
        pool = np.where(mask[..., None], clean, np.asarray(case.garbage).astype(dtype))
    else:
        stored, clean_scales = quantize(clean, case.kv_dtype)
        clean = stored.astype(np.float64) * clean_scales[..., None]
        pool = np.where(mask[..., None], stored, _garbage(case, rng, stored.shape))
        scales = np.where(mask, clean_scales, np.float32(case.garbage))

    sinks = rng.normal(size=H).astype(np.float32) if case.sinks else None
    kwargs = {
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": sinks,
        "score_fn": alibi if case.score_fn else None,
    }
    if scales is not None:
        kwargs["kv_scales"] = scales
    out, lse = answer(case, q, clean, tables, kv_lens, q_lens, sinks)
    args = (q, pool, poisoned, kv_lens, q_lens)
    return Arrays(args=args, kwargs=kwargs, out=out, lse=lse)


def _garbage(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of an 8-bit pool that must not be read: extremes, or NaN where there is one."""
    if case.kv_dtype == "int8":
        return rng.choice(np.int8([-128, 127]), shape)
    return np.full(shape, np.nan, ml_dtypes.float8_e4m3fn)


def answer(case: Case, q, pool, tables, kv_lens, q_lens, sinks) -> tuple[np.ndarray, np.ndarray]:
    """The loop of `paged_attention`'s docstring, in float64."""
    S, G = case.block_size, case.group
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    q, pool = q.astype(np.float64), pool.astype(np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(q.shape[:3]):
        if t >= q_lens[b]:
            continue
        q_pos = kv_lens[b] - q_lens[b] + t
        first = 0 if case.window is None else max(0, q_pos - case.window + 1)
        k_pos = np.arange(first, q_pos + 1)
        k, v = pool[tables[b, k_pos // S], :, h // G, k_pos % S].swapaxes(0, 1)
        score = k @ q[b, t, h] * scale
        if case.soft_cap is not None:
            score = case.soft_cap * np.tanh(score / case.soft_cap)
        if case.score_fn:
            score = np.asarray(alibi(score, b, h, q_pos, k_pos), np.float64)
        top = score.max()
        weight = np.exp(score - top)
        sink = 0.0 if sinks is None else np.exp(float(sinks[h]) - top)
        out[b, t, h] = weight @ v / (weight.sum() + sink)
        lse[b, t, h] = np.log(weight.sum()) + top
    return out, lse


def check(op: Callable[..., Any], case: Case) -> None:
    """Assert that `op(*args, return_lse=True, **kwargs)` gives the answer, all of it finite."""
    arrays = make(case)
    out, lse = op(*arrays.args, return_lse=True, **arrays.kwargs)
    assert out.dtype == arrays.args[0].dtype
    assert lse.dtype == jnp.float32
    tolerance = TOLERANCES[case.dtype]
    out = np.asarray(out).astype(np.float64)
    np.testing.assert_allclose(out, arrays.out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse), arrays.lse, rtol=tolerance, atol=tolerance)


def pairwise(**axes: tuple) -> list[dict[str, Any]]:
    """Few combinations that hold every pair of values of two axes at least once (greedy)."""
    names = list(axes)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(axes[names[a]]))
        for y in range(len(axes[names[b]]))
    }
    rng = np.random.default_rng(0)
    rows = []
    while pairs:
        candidates = [tuple(rng.integers(len(axes[n])) for n in names) for _ in range(50)]
        (a, x), (b, y) = min(pairs)
        for i, row in enumerate(candidates):  # each candidate covers at least one missing pair
            fixed = list(row)
            fixed[a], fixed[b] = x, y
            candidates[i] = tuple(int(value) for value in fixed)
        covered = [
            {p for p in itertools.combinations(list(enumerate(row)), 2) if p in pairs}
            for row in candidates
        ]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        pairs -= covered[best]
        rows.append({n: axes[n][i] for n, i in zip(names, candidates[best], strict=True)})
    return rows


def product(**axes: tuple) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
