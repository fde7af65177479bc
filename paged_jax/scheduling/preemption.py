"""What a preemption costs: the model by which the ``auto`` policy chooses (docs/preemption.md)."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Literal

PreemptionMode = Literal["recompute", "swap", "auto"]
PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreemptionCosts:
    """How fast a machine swaps and recomputes.

    Attributes:
      prefill_tokens_per_second: prompt positions computed in a second.
      swap_bytes_per_second: between device and host pool, one way.
      swap_seconds_per_block: on top of that, for each block moved, one way.

    Raises:
      ValueError: a rate is not positive and finite, or the time is negative.

    >>> costs = PreemptionCosts(
    ...     prefill_tokens_per_second=1e4, swap_bytes_per_second=1e9, swap_seconds_per_block=1e-4)
    >>> costs.recompute_seconds(160)
    0.016
    >>> costs.swap_seconds(10, block_nbytes=100_000)  # out and in
    0.004
    """

    prefill_tokens_per_second: float
    swap_bytes_per_second: float
    swap_seconds_per_block: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            is_rate = name != "swap_seconds_per_block"
            is_number = isinstance(value, numbers.Real) and math.isfinite(value)
            if not is_number or value < 0 or (is_rate and value == 0):
                least = "> 0" if is_rate else ">= 0"
                raise ValueError(f"{name}={value!r} must be a finite number {least}")

    def recompute_seconds(self, num_tokens: int) -> float:
        """Time to compute ``num_tokens`` positions once more."""
        return num_tokens / self.prefill_tokens_per_second

    def swap_seconds(self, num_blocks: int, *, block_nbytes: int) -> float:
        """Time to move ``num_blocks`` blocks of ``block_nbytes`` bytes out and in again."""
        one_way = block_nbytes / self.swap_bytes_per_second + self.swap_seconds_per_block
        return 2 * num_blocks * one_way


def default_costs(*, num_params: int, matmul_rate: float | None) -> PreemptionCosts:
    """Costs for a model, from figures of the machine; docs/preemption.md says where they are from.

    Args:
      num_params: of the model; a position takes two operations for each.
      matmul_rate: a GPU's dense 16-bit operations a second, or None on the CPU.
    """
    if matmul_rate is None:
        # Rounded from scripts/bench_preemption.py, SmolLM2-135M on two cores.
        achieved, bandwidth, per_block = 1.0e11, 1.5e9, 1e-4
    else:
        # Not measured here: 40 % of the data sheet, PCIe 4.0 x16 through pageable memory.
        achieved, bandwidth, per_block = 0.4 * matmul_rate, 1.0e10, 1e-5
    return PreemptionCosts(
        prefill_tokens_per_second=achieved / (2 * max(num_params, 1)),
        swap_bytes_per_second=bandwidth,
        swap_seconds_per_block=per_block,
    )
