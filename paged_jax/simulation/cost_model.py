"""How long a step takes: a roofline, with every constant in one record.

A step reads all weights once and computes them for all its tokens, whichever takes longer; each
row's attention reads its context's keys and values, and a prompt's attention computes; the layers'
outputs are summed over the GPUs; and something is lost to launches and to the host::

    dense     = max(weight_bytes / bandwidth, 2 * params * tokens / flops)
    attention = max(kv_bytes read / bandwidth, 4 * L * H * D * (new tokens x context) / flops)
    reduce    = 2 * L * (latency + 2 * (N - 1) / N * tokens * H * D * 2 bytes / link_bandwidth)
    step      = dense + attention + reduce + overhead + row_overhead * sampling rows

with bandwidth, flops and link bandwidth the peak times an efficiency, over all N GPUs. Left out:
activations' memory traffic, kernels' tails and tiles, contention, clocks, sampling's own compute
beyond ``row_overhead``, and the network to the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from paged_jax.simulation.assumptions import CostConstants
from paged_jax.simulation.machines import Server


class RowWork(NamedTuple):
    """One row of a step: ``num_new`` tokens computed, attending to ``context`` tokens."""

    num_new: int
    context: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Where a step's seconds go; ``total`` is their sum."""

    dense: float
    attention: float
    reduce: float
    moves: float
    overhead: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.dense + self.attention + self.reduce + self.moves + self.overhead


class CostModel:
    """Predicts the time of steps on a server.

    Args:
      server: model, GPUs.
      constants: what is reached of their peaks.
    """

    def __init__(self, server: Server, constants: CostConstants) -> None:
        self.server = server
        self.constants = constants

    def step_time(
        self,
        rows: Iterable[RowWork],
        *,
        num_sampled: int,
        num_copied_blocks: int = 0,
        num_swapped_blocks: int = 0,
        block_size: int = 16,
    ) -> StepTime:
        """Predict one step.

        Args:
          rows: what is computed.
          num_sampled: tokens that are sampled.
          num_copied_blocks: blocks copied on the device.
          num_swapped_blocks: blocks moved to or from the host.
          block_size: token positions a block.
        """
        model, gpu, constants = self.server.model, self.server.gpu, self.constants
        num_gpus = self.server.num_gpus
        bandwidth = gpu.bandwidth * constants.bandwidth_efficiency * num_gpus
        flops = gpu.flops * constants.flops_efficiency * num_gpus
        num_tokens = num_context = num_scores = 0
        for num_new, context in rows:
            num_tokens += num_new
            num_context += context
            # A causal row's queries see half of its own tokens on average.
            num_scores += num_new * (context - (num_new - 1) / 2)
        width = model.num_heads * model.head_dim
        dense = max(model.weight_bytes / bandwidth, 2 * model.num_params * num_tokens / flops)
        attention = max(
            num_context * model.kv_bytes_per_token / bandwidth,
            4 * model.num_layers * width * num_scores / flops,
        )
        reduce = 0.0
        if num_gpus > 1:
            link = gpu.link_bandwidth * constants.link_efficiency
            moved = 2 * (num_gpus - 1) / num_gpus * num_tokens * width * 2
            reduce = 2 * model.num_layers * (constants.reduce_latency + moved / link)
        block_bytes = block_size * model.kv_bytes_per_token
        moves = 2 * num_copied_blocks * block_bytes / bandwidth
        moves += num_swapped_blocks * (
            block_bytes / constants.host_bandwidth + constants.swap_latency
        )
        overhead = constants.overhead + constants.row_overhead * num_sampled
        return StepTime(dense, attention, reduce, moves, overhead)
