"""What a simulated run is asked for."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from paged_jax.blocks.demand import ReservationPolicy
from paged_jax.scheduling.preemption import PREEMPTION_MODES, PreemptionMode
from paged_jax.simulation.assumptions import (
    BEAM_CONCENTRATION,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    CostConstants,
)
from paged_jax.simulation.machines import Server

Policy = ReservationPolicy | Literal["static"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """How requests are served, whatever the policy.

    Attributes:
      block_size: token positions a block.
      num_blocks: of the pool, the null block included; None: what the server has.
      max_num_seqs: most running sequences.
      max_num_batched_tokens: most prompt tokens of a step.
      prefill_row_len: prompt tokens of a row; a step has rows for ``max_num_batched_tokens`` (an
        engine's are for its programs' sake; here short ones let many short prompts start at once).
      max_model_len: longest context in tokens; None: the model's. Never more than fits the pool.
      prefix_cache: share what is computed, by the requests' ``prefix_ids``; those without share
        nothing.
      tokens_per_id: prompt tokens that each of the ``prefix_ids`` stands for.
      num_samples: sequences of each request (parallel sampling).
      beam_width: of a beam search instead; None: none.
      beam_concentration: how many next tokens are alike in it (``beams.BeamModel``).
      shared_prefix_len: tokens before each prompt that are the same for all: with the policy
        'paged' a registered prefix, there from the beginning; with others a part of each prompt.
      preemption: how blocks are taken away.
      num_host_blocks: of the host pool, for swapping, its null block included.
      constants: of the cost model.
      seed: of the beam searches' chance.
      event_log: file for the event record, in virtual time; None: none.
      hides_lengths: the scheduler learns that an output ends by its last token, as in serving;
        False: it is told beforehand (``max_tokens``).
      traces_steps: keep what each step did to the pool (``SimulationResult.steps``).

    Raises:
      ValueError: a value is out of range, or two exclude each other.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    prefill_row_len: int = 16
    max_model_len: int | None = None
    prefix_cache: bool = False
    tokens_per_id: int = 16
    num_samples: int = 1
    beam_width: int | None = None
    beam_concentration: float = BEAM_CONCENTRATION
    shared_prefix_len: int = 0
    preemption: PreemptionMode = "recompute"
    num_host_blocks: int = 0
    constants: CostConstants = dataclasses.field(default_factory=CostConstants)
    seed: int = 0
    event_log: str | os.PathLike[str] | None = None
    hides_lengths: bool = True
    traces_steps: bool = False

    def __post_init__(self) -> None:
        least = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        least |= {
            "prefill_row_len": 1,
            "num_samples": 1,
            "tokens_per_id": 1,
            "shared_prefix_len": 0,
            "seed": 0,
        }
        least |= {"num_blocks": 2, "max_model_len": 1, "beam_width": 1, "num_host_blocks": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value} must be >= {low}")
        if self.preemption not in PREEMPTION_MODES:
            raise ValueError(f"preemption={self.preemption!r} must be one of {PREEMPTION_MODES}")
        if self.beam_concentration <= 0:
            raise ValueError(f"beam_concentration={self.beam_concentration} must be > 0")
        if self.beam_width is not None and self.num_samples > 1:
            message = f"num_samples={self.num_samples} must be 1 with beam_width={self.beam_width}"
            raise ValueError(message)
        if self.prefix_cache and self.shared_prefix_len:
            raise ValueError(
                f"shared_prefix_len={self.shared_prefix_len} must be 0 with prefix_cache=True, "
                "which finds whatever is shared"
            )

    @property
    def num_sequences(self) -> int:
        """Of each request."""
        return self.beam_width or self.num_samples

    def resolve_num_blocks(self, server: Server) -> int:
        """Blocks of the pool, the null block included."""
        return self.num_blocks or server.num_blocks(self.block_size)

    def resolve_max_model_len(self, server: Server) -> int:
        """Longest context in tokens.

        Raises:
          ValueError: ``max_model_len`` is more than the model's.
        """
        longest = server.model.max_position
        wanted = self.max_model_len or longest
        if wanted > longest:
            raise ValueError(f"max_model_len={wanted} must be at most the model's {longest}")
        return min(wanted, (self.resolve_num_blocks(server) - 1) * self.block_size)
