"""What a request will want to hold, and what contiguous policies reserve for it (paper 6.1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

ContiguousPolicy = Literal["orca_max", "orca_pow2", "orca_oracle"]
ReservationPolicy = Literal["paged", ContiguousPolicy]
RESERVATION_POLICIES: tuple[ReservationPolicy, ...] = (
    "paged",
    "orca_max",
    "orca_pow2",
    "orca_oracle",
)


class Demand(NamedTuple):
    """Of one sequence group; a paged manager, which reserves nothing, looks at none of it.

    Attributes:
      seq_ids: its sequences that have not ended.
      num_prompt: tokens of the prompt.
      num_output: tokens that each sequence will emit; unless an oracle knows better, the most that
        it may.
    """

    seq_ids: tuple[int, ...]
    num_prompt: int
    num_output: int


def num_reserved(policy: ContiguousPolicy, demand: Demand, *, max_model_len: int) -> int:
    """Token positions that a policy reserves for each sequence of a group.

    >>> demand = Demand((0,), num_prompt=100, num_output=25)
    >>> [num_reserved(name, demand, max_model_len=2048)
    ...  for name in ("orca_max", "orca_pow2", "orca_oracle")]
    [2048, 132, 125]
    """
    if policy == "orca_max":
        return max_model_len
    num_output = demand.num_output
    if policy == "orca_pow2":
        num_output = 1 << (max(num_output, 1) - 1).bit_length()
    return max(min(demand.num_prompt + num_output, max_model_len), 1)
