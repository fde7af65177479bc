"""The requests of the paper's experiments: drawn lengths, arriving by a Poisson process."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from paged_jax.simulation.arrivals import poisson
from paged_jax.simulation.assumptions import Assumptions
from paged_jax.simulation.lengths import DATASETS, Dataset, draw_requests
from paged_jax.simulation.traces import TraceRequest

WorkloadName = Literal["sharegpt", "alpaca", "translation", "chat"]

# Outputs of Alpaca and of translations are a sixth or less as long as ShareGPT's and chats', and so
# are the times in which queues grow: their traces are a sixth as long for the same effect.
_SHARE_OF_MINUTES = {"sharegpt": 1.0, "chat": 1.0, "alpaca": 1 / 6, "translation": 1 / 6}

# As many whatever the rate, so that a run at another rate has the same requests in the same order.
_NUM_DRAWS = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What arrives.

    Attributes:
      name: of the lengths.
      rate: requests a second.
      minutes: of arrivals, for ShareGPT; Alpaca and translations take a sixth of it.
      seed: of lengths and arrivals.
    """

    name: WorkloadName
    rate: float
    minutes: float
    seed: int = 0

    def requests(self, assumptions: Assumptions) -> list[TraceRequest]:
        """Draw them, in order of arrival.

        Raises:
          ValueError: no such lengths can be drawn.
        """
        num_requests = round(self.rate * self.minutes * 60 * _SHARE_OF_MINUTES[self.name])
        num_requests = max(num_requests, 1)
        if self.name == "chat":
            requests = _chat_rounds(num_requests, self.seed, assumptions)
        else:
            requests = _draw(self.name, num_requests, self.seed, assumptions)
        return poisson(requests, rate=self.rate, seed=self.seed)


def _draw(name: str, num_requests: int, seed: int, assumptions: Assumptions) -> list[TraceRequest]:
    """Independent lengths with a dataset's means."""
    if name == "translation":
        means = assumptions.translation_prompt_mean, assumptions.translation_output_mean
        dataset = Dataset(*means, {}, {})
        spreads = (assumptions.translation_spread,) * 2
    else:
        dataset = DATASETS[name]
        spreads = assumptions.prompt_spread, assumptions.output_spread
    num_draws = _NUM_DRAWS
    while num_draws < 2 * num_requests:
        num_draws *= 2
    drawn = draw_requests(
        dataset,
        num_draws,
        seed=seed,
        prompt_spread=spreads[0],
        output_spread=spreads[1],
        min_len=assumptions.min_len,
        max_prompt=assumptions.max_prompt,
        max_total=assumptions.max_total,
    )
    if len(drawn) < num_requests:
        raise ValueError(
            f"only {len(drawn)} of {num_draws} draws are within the bounds, "
            f"num_requests={num_requests} are needed"
        )
    return drawn[:num_requests]


def _chat_rounds(num_rounds: int, seed: int, assumptions: Assumptions) -> list[TraceRequest]:
    """Rounds of conversations in any order: each prompt is the end of history and question.

    Nothing is kept between rounds (paper 6.5), so which conversation a round is of doesn't matter.
    """
    rng = np.random.default_rng(seed)
    turns = iter(_draw("sharegpt", num_rounds, seed, assumptions))
    rounds: list[TraceRequest] = []
    num_left = num_history = 0
    for turn in turns:
        if num_left == 0:
            # A geometric distribution starts at one turn, whatever the mean.
            num_left = int(rng.geometric(min(1 / assumptions.chat_mean_turns, 1.0)))
            num_history = 0
        num_prompt = min(num_history + turn.num_prompt, assumptions.chat_max_prompt)
        num_output = min(turn.num_output, assumptions.chat_max_output)
        rounds.append(TraceRequest(num_prompt, num_output))
        num_history += turn.num_prompt + turn.num_output
        num_left -= 1
    return [rounds[index] for index in rng.permutation(len(rounds))]
