"""Frozen, validated settings: what a model needs from the cache, and how the engine runs."""

from __future__ import annotations

import dataclasses
import numbers
import os
from typing import Any, Literal

from paged_jax.blocks.demand import RESERVATION_POLICIES, ReservationPolicy
from paged_jax.scheduling.preemption import PREEMPTION_MODES, PreemptionCosts, PreemptionMode

EVENT_LOG_BYTES = 64 * 2**20
EVENT_LOG_FILES = 8
Scheduling = Literal["fcfs", "priority"]
SCHEDULINGS: tuple[Scheduling, ...] = ("fcfs", "priority")
ATTENTION_BACKENDS = (None, "mosaic", "triton", "xla", "reference")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def _require_int(name: str, value: Any, minimum: int) -> None:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(is_int and int(value) >= minimum, f"{name}={value!r} must be an integer >= {minimum}")


def _require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    require(value in choices, f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts about a model that the cache, the pool and the scheduler need.

    Attributes:
      num_layers: layers that keep keys and values (L).
      num_heads: query heads (H).
      num_kv_heads: key/value heads (K); must divide ``num_heads``.
      head_dim: channels a head (D).
      vocab_size: entries of the logits (V).
      max_position: longest context in tokens that the model was made for.
      window: most keys that a query attends to in any layer, its own included: blocks that fell
        behind it are freed. None: some layer sees everything, so all blocks stay, whatever windows
        the other layers have.

    Raises:
      ValueError: a field is not a positive integer, or K does not divide H.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    window: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "window" or self.window is not None:
                _require_int(field.name, getattr(self, field.name), 1)
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}",
        )

    @property
    def kv_values_per_token(self) -> int:
        """Stored numbers a token: keys and values of all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramSpeculation:
    """Speculative decoding by prompt lookup (docs/speculation.md).

    Attributes:
      num_draft_tokens: most drafted tokens that a row verifies; the row computes one more.
      min_ngram_len: shortest ending of a text whose earlier continuation is a draft.
      max_ngram_len: longest; longer ones are looked up first.

    Raises:
      ValueError: a field is not a positive integer, or the lengths are not in order.
    """

    num_draft_tokens: int = 4
    min_ngram_len: int = 2
    max_ngram_len: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _require_int(field.name, getattr(self, field.name), 1)
        require(
            self.min_ngram_len <= self.max_ngram_len,
            f"min_ngram_len={self.min_ngram_len} must be at most "
            f"max_ngram_len={self.max_ngram_len}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine sizes its pool and batches its work.

    The pool is sized by exactly one of ``num_blocks``, ``pool_bytes`` and ``memory_fraction``;
    with none given, for ``max_num_seqs`` sequences of 1024 tokens (or ``max_model_len``, if less).

    Attributes:
      block_size: token positions a block (S); the paper's default is 16.
      num_blocks: blocks in the pool, the null block included.
      pool_bytes: bytes that the pool may take.
      memory_fraction: share in (0, 1) of the device's free memory.
      kv_dtype: dtype name of the pool: float32, bfloat16 or float16, or int8 or float8_e4m3fn,
        which store each key and value in 8 bits with a float32 scale a token and head. That
        changes the numbers (paging does not): results are close to, not equal to, a float pool's.
      pool_head_dim: channels a head in the pool, at least the model's, the rest zeros; None means
        the model's own. Some kernels take only some sizes; the pool's bytes grow with it.
      reservation: 'paged', or a contiguous baseline of the paper's section 6.1 over the same pool,
        which needs ``prefix_cache=False``: 'orca_max' reserves ``max_model_len`` tokens a sequence,
        'orca_pow2' its ``max_tokens`` rounded up to a power of two, 'orca_oracle' just those.
      preemption: how requests lose their blocks when the pool is full (docs/preemption.md):
        'recompute', 'swap' to a pool in host memory, or 'auto', the faster one by a cost model.
      num_host_blocks: blocks of the host pool, one that is never used included.
      swap_bytes: bytes that the host pool may take, instead. With neither it is as large as the
        device's pool; memory is taken as blocks are first swapped.
      preemption_costs: what 'auto' goes by; None: figures for the device.
      scheduling: 'fcfs' (first come, first served), or 'priority': a request of lower ``priority``
        starts first and is preempted last.
      max_num_seqs: most sequences in one step.
      max_num_batched_tokens: most prompt tokens computed in one step (the token budget).
      prefill_row_len: tokens a prefill row (T); prompts are cut into rows of this length.
      prefill_chunk_len: most tokens of one prompt in one step; None means the whole budget.
      max_model_len: longest context; None means the model's own, and never more than fits the pool.
      prefix_cache: a prompt's beginning that was computed before is not computed again
        (docs/prefix_cache.md): the same answer up to float32's noise, sooner. False: every request
        runs cold, but for registered prefixes; for measurements, or runs equal to the last bit.
      seed: draws the random streams of requests that bring no seed of their own.
      attention_backend: 'mosaic', 'triton', 'xla', 'reference', or None for the best one here.
        Writes and copies use it too, where it has them.
      kernel_interpreter: run the named 'mosaic' or 'triton' backend in Pallas's interpreter, on
        any device: for tests, very slow.
      donate: give the pool's buffer to each step (False keeps a second pool, for debugging).
      check_logits: raise FloatingPointError when a step yields NaN logits.
      debug_integrity: call ``check_integrity()`` after every step.
      zero_on_free: overwrite blocks with zeros on the device when they become free: before anybody
        else gets them, and at the latest at the end of the step in which they did (of blocks freed
        by ``cancel``: the next step). No result depends on it.
      event_log: file for the event record (docs/events.md); None writes none.
      event_log_bytes: size at which a file of the record is full and a new one begins.
      event_log_files: full files that are kept beside it.
      speculation: draft tokens and verify several in a step; None: one token a step. The tokens are
        the same either way.

    Raises:
      ValueError: a value is out of range, a pool is sized in two ways, or there is a size of the
        host pool without swapping, or costs without 'auto'.
    """

    block_size: int = 16
    num_blocks: int | None = None
    pool_bytes: int | None = None
    memory_fraction: float | None = None
    kv_dtype: str = "float32"
    pool_head_dim: int | None = None
    reservation: ReservationPolicy = "paged"
    preemption: PreemptionMode = "recompute"
    num_host_blocks: int | None = None
    swap_bytes: int | None = None
    preemption_costs: PreemptionCosts | None = None
    scheduling: Scheduling = "fcfs"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_row_len: int = 32
    prefill_chunk_len: int | None = None
    max_model_len: int | None = None
    prefix_cache: bool = True
    seed: int = 0
    attention_backend: str | None = None
    kernel_interpreter: bool = False
    donate: bool = True
    check_logits: bool = False
    debug_integrity: bool = False
    zero_on_free: bool = False
    event_log: str | os.PathLike[str] | None = None
    event_log_bytes: int = EVENT_LOG_BYTES
    event_log_files: int = EVENT_LOG_FILES
    speculation: NgramSpeculation | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_row_len",
            "event_log_bytes",
        ):
            _require_int(name, getattr(self, name), 1)
        _require_int("event_log_files", self.event_log_files, 0)
        for name, minimum in (
            ("num_blocks", 2),
            ("pool_bytes", 1),
            ("pool_head_dim", 1),
            ("num_host_blocks", 2),
            ("swap_bytes", 1),
            ("prefill_chunk_len", 1),
            ("max_model_len", 1),
        ):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), minimum)
        _require_int("seed", self.seed, 0)
        switches = ("prefix_cache", "donate", "check_logits", "debug_integrity", "zero_on_free")
        for name in (*switches, "kernel_interpreter"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name}={value!r} must be True or False")
        require(
            self.event_log is None or isinstance(self.event_log, (str, os.PathLike)),
            f"event_log={self.event_log!r} must be the path of a file, or None",
        )
        require(
            self.speculation is None or isinstance(self.speculation, NgramSpeculation),
            f"speculation={self.speculation!r} must be NgramSpeculation or None",
        )
        share = self.memory_fraction
        require(
            share is None or (isinstance(share, numbers.Real) and 0 < share < 1),
            f"memory_fraction={self.memory_fraction!r} must lie between 0 and 1",
        )
        sizes = ("num_blocks", "pool_bytes", "memory_fraction")
        given = [name for name in sizes if getattr(self, name) is not None]
        require(len(given) <= 1, f"size the pool in one way, not by {' and '.join(given)}")
        _require_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        self._check_preemption()
        _require_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        require(
            not self.kernel_interpreter or self.attention_backend in ("mosaic", "triton"),
            f"attention_backend={self.attention_backend!r} must be 'mosaic' or 'triton' with "
            "kernel_interpreter=True",
        )

    def _check_preemption(self) -> None:
        _require_choice("preemption", self.preemption, PREEMPTION_MODES)
        _require_choice("scheduling", self.scheduling, SCHEDULINGS)
        _require_choice("reservation", self.reservation, RESERVATION_POLICIES)
        require(
            self.reservation == "paged" or not self.prefix_cache,
            f"prefix_cache=True must be False with reservation={self.reservation!r}: contiguous "
            "regions share nothing",
        )
        require(
            self.reservation == "paged" or self.preemption == "recompute",
            f"preemption={self.preemption!r} must be 'recompute' with reservation="
            f"{self.reservation!r}, which never preempts",
        )
        sizes = [n for n in ("num_host_blocks", "swap_bytes") if getattr(self, n) is not None]
        require(len(sizes) <= 1, f"size the host pool in one way, not by {' and '.join(sizes)}")
        require(
            not sizes or self.preemption != "recompute",
            f"preemption={self.preemption!r} must be 'swap' or 'auto' with {' '.join(sizes)}",
        )
        costs = self.preemption_costs
        require(
            costs is None or isinstance(costs, PreemptionCosts),
            f"preemption_costs={costs!r} must be PreemptionCosts or None",
        )
        require(
            costs is None or self.preemption == "auto",
            f"preemption={self.preemption!r} must be 'auto' with preemption_costs",
        )
