"""What is compiled: the ops at chosen shapes, JAX's own kernel beside them, whole steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES

NUM_KV_HEADS = 8
NUM_ROWS = 32
CONTEXT = 2048
PREFILL_ROWS = 4
NUM_LAYERS = 4
NUM_COPIES = 16
KINDS = ("decode", "verify", "prefill", "kv_write", "block_copy", "swap_out", "swap_in", "step")
MOVES = ("block_copy", "swap_out", "swap_in")  # of whole blocks, all layers
BACKENDS = ("mosaic", "triton", "xla", "jax", "jax8")
THEIRS = ("jax", "jax8")  # JAX's own deprecated kernel with four warps, and with eight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program to compile; letters as in docs/design.md.

    Attributes:
        kind: one of `KINDS`.
        backend: one of `BACKENDS`.
        block_size: S.
        group: query heads a KV head, G; there are `NUM_KV_HEADS` KV heads.
        head_dim: D of the pool.
        new_tokens: T.
        kv_dtype: of the pool; 8-bit ones have scales.
        query_dim: D of the queries and of new keys and values; smaller where the pool pads.
        is_big: the pool has more than 2**31 elements.
    """

    kind: str
    backend: str
    block_size: int = 16
    group: int = 4
    head_dim: int = 128
    new_tokens: int = 1
    kv_dtype: str = "bfloat16"
    query_dim: int | None = None
    is_big: bool = False

    @property
    def name(self) -> str:
        """Short, unique within a backend."""
        dim = f"{self.query_dim}in" * (self.query_dim is not None)
        short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "float8_e4m3fn": "e4m3"}
        parts = [self.kind, f"s{self.block_size}"]
        if self.kind not in ("kv_write", *MOVES):
            parts.append(f"g{self.group}")
        parts += [f"d{dim}{self.head_dim}", short.get(self.kv_dtype, self.kv_dtype)]
        parts += [f"t{self.new_tokens}"] * (self.new_tokens > 1) + ["big"] * self.is_big
        return "-".join(parts)

    @property
    def key(self) -> str:
        """Unique among all cases."""
        return f"{self.backend}/{self.name}"

    @property
    def is_attention(self) -> bool:
        """Whether the case is the attention kernel alone."""
        return self.kind in ("decode", "verify", "prefill")

    @property
    def q_dtype(self) -> str:
        """Dtype of queries and of new keys and values."""
        return "bfloat16" if self.kv_dtype in QUANTIZED_DTYPES else self.kv_dtype

    @property
    def num_blocks(self) -> int:
        """Blocks of a layer: twice what the rows' contexts need, or a few over 2**31 elements."""
        if self.is_big:
            layers = NUM_LAYERS if self.kind in ("step", *MOVES) else 1
            pools = 1 if self.backend in THEIRS else 2  # its K and V are two arrays
            elements = layers * pools * NUM_KV_HEADS * self.block_size * self.head_dim
            return 2**31 // elements + 64
        return 2 * NUM_ROWS * CONTEXT // self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token of one KV head."""
        return 2 * self.head_dim * jnp.dtype(self.kv_dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to compile: `pool_bytes` of its arguments `donated` must stay in place."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    pool_bytes: int = 0


def all_cases() -> list[Case]:
    """Every case, the most telling first."""
    cases = []
    for backend in ("mosaic", "triton"):
        add = functools.partial(Case, backend=backend)
        for size, group in [(16, 4), (64, 4), (16, 8), (64, 8), (16, 7), (64, 7)]:
            cases.append(add(kind="decode", block_size=size, group=group))
        for size, dim in [(16, 64), (64, 64), (16, 256), (64, 256)]:
            cases.append(add(kind="decode", block_size=size, head_dim=dim))
        cases.append(add(kind="decode", head_dim=80))
        cases.append(add(kind="decode", head_dim=128, query_dim=80))
        for dtype in ("float16", "float32", "int8", "float8_e4m3fn"):
            cases.append(add(kind="decode", kv_dtype=dtype))
        cases.append(add(kind="decode", is_big=True))
        for size, dim in [(16, 128), (64, 128), (16, 64)]:
            cases.append(add(kind="verify", block_size=size, head_dim=dim, new_tokens=4))
        for size, group, dim in [(16, 4, 128), (64, 4, 128), (16, 7, 64), (64, 8, 256)]:
            cases.append(
                add(kind="prefill", block_size=size, group=group, head_dim=dim, new_tokens=512)
            )
        for dtype in ("float32", "int8"):
            cases.append(add(kind="prefill", kv_dtype=dtype, new_tokens=512))
        cases.append(add(kind="prefill", new_tokens=512, is_big=True))
        for kind in ("kv_write", "block_copy"):
            for size, dtype, is_big in [
                (16, "bfloat16", False),
                (64, "bfloat16", False),
                (16, "float32", False),
                (16, "int8", False),
                (16, "bfloat16", True),
            ]:
                cases.append(add(kind=kind, block_size=size, kv_dtype=dtype, is_big=is_big))
        cases.append(add(kind="kv_write", new_tokens=512))
        for kind in ("swap_out", "swap_in"):
            cases += [add(kind=kind), add(kind=kind, kv_dtype="int8"), add(kind=kind, is_big=True)]
    for backend in ("mosaic", "triton", "xla"):
        for size in (16, 64):
            cases.append(Case(kind="step", backend=backend, block_size=size))
        if backend != "xla":
            cases.append(Case(kind="step", backend=backend, kv_dtype="int8"))
            cases.append(Case(kind="step", backend=backend, is_big=True))
    for size, group, dim in [(16, 4, 128), (64, 4, 128), (16, 8, 128), (16, 7, 128), (16, 4, 64)]:
        for backend in THEIRS:
            cases.append(
                Case(kind="decode", backend=backend, block_size=size, group=group, head_dim=dim)
            )
    for dtype, is_big in [("float32", False), ("int8", False), ("bfloat16", True)]:
        cases.append(Case(kind="decode", backend="jax", kv_dtype=dtype, is_big=is_big))
    return cases
