"""Calls of the ops with everything that must not be read poisoned."""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
# Largest difference to `reference`, whose products are float32; on GPUs those of the other
# backends may be TF32 (10 bits of mantissa).
TOLERANCES = {
    "float32": 4e-3,
    "bfloat16": 2e-2,
    "float16": 4e-3,
    "int8": 2e-2,
    "float8_e4m3fn": 2e-2,
}
POISON_ENTRIES = (-1, 2**30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """The settings of one call of `paged_attention`; `kv_dtype` is the pool's."""

    kv_dtype: str = "bfloat16"
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    max_new: int = 1
    longest: int = 700
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """Short and unique among the cases of a run."""
        parts = [self.kv_dtype, f"S{self.block_size}", f"G{self.group}", f"D{self.head_dim}"]
        parts.append(f"T{self.max_new}")
        parts += [f"w{self.window}"] if self.window else []
        parts += ["cap"] if self.soft_cap else []
        parts += ["sinks"] if self.sinks else []
        return "-".join([*parts, f"n{self.longest}"])

    @property
    def kv_lens(self) -> np.ndarray:
        """Row lengths 0, 1, S-1, S, S+1, about half and all of the longest."""
        S, longest = self.block_size, self.longest
        return np.array([0, 1, S - 1, S, S + 1, longest // 2 + 1, longest], np.int32)

    @property
    def q_lens(self) -> np.ndarray:
        """Up to T new tokens a row; the last row but one has fewer."""
        q_lens = np.minimum(self.kv_lens, self.max_new)
        q_lens[-2] = max(1, self.max_new // 2)
        return q_lens.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArrays:
    """Arguments of `paged_attention`: positional ones, and those that are arrays or scalars."""

    args: tuple[np.ndarray, ...]
    arrays: dict[str, np.ndarray]
    scalars: dict[str, Any]


@functools.lru_cache(maxsize=4)  # the backends of a case follow one another
def attention_arrays(case: AttentionCase) -> AttentionArrays:
    """Draw queries, a pool and shuffled tables; NaN or the largest values wherever nothing may be
    read, -1 or 2**30 in table entries that are not in use.
    """
    rng = np.random.default_rng(case.seed)
    S, K, D = case.block_size, case.num_kv_heads, case.head_dim
    kv_lens, q_lens = case.kv_lens, case.q_lens
    B, M = len(kv_lens), -(-case.longest // S) + 1
    N = B * M + 3
    is_quantized = case.kv_dtype in ("int8", "float8_e4m3fn")
    q_dtype = DTYPES["bfloat16" if is_quantized else case.kv_dtype]
    q = rng.normal(size=(B, case.max_new, K * case.group, D)).astype(q_dtype)
    tables = (rng.permutation(N - 1)[: B * M] + 1).reshape(B, M).astype(np.int32)
    readable = np.zeros((N, S), bool)
    for b in range(B):
        first = 0
        if case.window is not None:
            first = max(0, int(kv_lens[b] - q_lens[b]) - case.window + 1)
        position = np.arange(first, kv_lens[b] if q_lens[b] else 0)
        readable[tables[b, position // S], position % S] = True
        tables[b, : first // S] = POISON_ENTRIES[b % 2]
        tables[b, -(-kv_lens[b] // S) :] = POISON_ENTRIES[b % 2]
    mask = readable[:, None, None, :]  # [N, 1, 1, S]
    arrays: dict[str, np.ndarray] = {}
    if is_quantized:
        stored = rng.integers(-127, 128, size=(N, 2, K, S, D))
        kv_scales = rng.uniform(0.005, 0.02, size=(N, 2, K, S)).astype(np.float32)
        arrays["kv_scales"] = np.where(mask, kv_scales, np.float32(np.nan))
        garbage = np.asarray(127 if case.kv_dtype == "int8" else np.nan)
    else:
        stored = rng.standard_normal(size=(N, 2, K, S, D), dtype=np.float32)
        garbage = np.asarray(np.nan)
    dtype = DTYPES[case.kv_dtype]
    pool = np.where(mask[..., None], stored.astype(dtype), garbage.astype(dtype))
    if case.sinks:
        arrays["sinks"] = rng.normal(size=K * case.group).astype(np.float32)
    scalars = {"window": case.window, "soft_cap": case.soft_cap}
    return AttentionArrays(args=(q, pool, tables, kv_lens, q_lens), arrays=arrays, scalars=scalars)


def attention_cases(*, rehearsal: bool) -> list[AttentionCase]:
    """Cases in order of value: the common shapes first, then every axis in turn."""
    if rehearsal:
        toy = AttentionCase(head_dim=64, num_kv_heads=1, longest=40, window=20, max_new=2)
        return [toy]
    base = AttentionCase()
    change = dataclasses.replace
    decode = [
        base,
        change(base, block_size=64),
        change(base, head_dim=64, group=3, num_kv_heads=3),  # SmolLM2
        change(base, group=8, num_kv_heads=1, longest=3000),
        change(base, head_dim=256, group=2, window=100, block_size=32),
        change(base, kv_dtype="float16", sinks=True, group=7),
        change(base, kv_dtype="float32", soft_cap=20.0),
        change(base, kv_dtype="int8"),
        change(base, kv_dtype="float8_e4m3fn"),
        change(base, block_size=8, group=1, soft_cap=30.0, sinks=True, window=300),
        change(base, block_size=128, head_dim=96, group=16, kv_dtype="float16"),
        change(base, head_dim=80, group=5, kv_dtype="float32", window=64),
        change(base, group=64, num_kv_heads=1, block_size=64, sinks=True),
        change(base, kv_dtype="int8", block_size=64, head_dim=64, window=50),
        change(base, kv_dtype="float8_e4m3fn", block_size=32, head_dim=256, soft_cap=20.0),
    ]
    several = [
        change(case, max_new=new, longest=longest, seed=new)
        for new, longest in ((64, 900), (4, 700), (512, 1300))
        for case in (
            change(base, window=200),
            change(base, head_dim=64, group=3, num_kv_heads=3, block_size=64, sinks=True),
            change(base, head_dim=256, group=2, soft_cap=30.0),
            change(base, kv_dtype="float32", group=7, block_size=32),
            change(base, kv_dtype="int8", group=1),
            change(base, kv_dtype="float16", head_dim=80, block_size=8),
            change(base, kv_dtype="float8_e4m3fn", block_size=64),
            change(base, head_dim=96, block_size=128, group=16, num_kv_heads=1),
        )
    ]
    # Decode and prefill in turns, so that a short budget sees both.
    return [x for pair in zip(decode, several, strict=False) for x in pair] + several[len(decode) :]
