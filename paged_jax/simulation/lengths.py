"""Request lengths like those of the paper's two datasets, of which it gives the means only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paged_jax.simulation.assumptions import (
    MAX_PROMPT,
    MAX_TOTAL,
    MIN_LEN,
    OUTPUT_SPREAD,
    PROMPT_SPREAD,
)
from paged_jax.simulation.traces import TraceRequest

__all__ = ["DATASETS", "MAX_PROMPT", "MAX_TOTAL", "MIN_LEN", "Dataset", "draw_requests"]


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Mean lengths in tokens (paper, Fig. 11) and memory savings in percent (its Fig. 15).

    Attributes:
      mean_prompt: of all requests.
      mean_output: the same.
      parallel: saving of parallel sampling by number of sequences; what the paper does not print
        is left out.
      beam: of beam search, by width.
    """

    mean_prompt: float
    mean_output: float
    parallel: dict[int, float]
    beam: dict[int, float]


DATASETS = {
    "sharegpt": Dataset(161.31, 337.99, {2: 16.2, 6: 30.5}, {2: 44.3, 6: 66.3}),
    "alpaca": Dataset(19.31, 58.45, {2: 6.09, 4: 8.53, 6: 9.79}, {2: 37.56, 4: 53.13, 6: 55.16}),
}


def fit_spread(lens: Sequence[int]) -> float:
    """The lognormal distribution's maximum-likelihood sigma."""
    return float(np.log(lens).std())


def draw_requests(
    dataset: Dataset,
    num_draws: int,
    *,
    seed: int,
    prompt_spread: float = PROMPT_SPREAD,
    output_spread: float = OUTPUT_SPREAD,
    min_len: int = MIN_LEN,
    max_prompt: int = MAX_PROMPT,
    max_total: int = MAX_TOTAL,
) -> list[TraceRequest]:
    """Draw independent lognormal lengths; those out of bounds are dropped.

    The two scales are such that the means of what is left are the dataset's, on this very sample.

    Args:
      dataset: gives the means.
      num_draws: requests before any is dropped.
      seed: of the draws.
      prompt_spread: sigma of the prompts' logarithms.
      output_spread: of the outputs'.
      min_len: least tokens of a prompt, and of an output.
      max_prompt: most tokens of a prompt.
      max_total: of prompt and output.

    Raises:
      ValueError: too few requests, or too large spreads, for such means.
    """
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((2, num_draws)) * [[prompt_spread], [output_spread]]
    means = np.array([dataset.mean_prompt, dataset.mean_output])
    scales = np.log(means)
    for _ in range(100):
        lens = np.rint(np.exp(scales[:, None] + noise)).astype(int)
        kept = (lens.min(0) >= min_len) & (lens[0] <= max_prompt) & (lens.sum(0) <= max_total)
        if not kept.any():
            break
        errors = np.log(means / lens[:, kept].mean(1))
        if np.abs(errors).max() < 0.01:
            return [TraceRequest(*pair) for pair in lens[:, kept].T.tolist()]
        scales += errors
    raise ValueError(
        f"num_draws={num_draws} must be more, or prompt_spread={prompt_spread} and output_spread="
        f"{output_spread} smaller: no means of {means.tolist()} within the bounds"
    )
