"""What the sampler gets for a step: one value a row, and the few facts that choose its code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from paged_jax.config import require
from paged_jax.sampling.params import MAX_LOGPROBS, SamplingParams

BIAS_WIDTHS = (0, 16, 512)
LOGPROB_WIDTHS = (0, 5, MAX_LOGPROBS)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition",
        "presence",
        "frequency",
        "bias_ids",
        "bias_values",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerInputs:
    """The sampling parameters of a step's rows, as arrays; NB is the bias width.

    Attributes:
      temperature: at most 1e-5: the row is greedy.
      top_k: below 1: no limit.
      top_p: 1: no limit.
      min_p: 0: no limit.
      repetition: 1: none.
      presence: 0: none.
      frequency: 0: none.
      bias_ids: token ids, unused entries 0.
      bias_values: added to the logits, -inf to ban a token, unused entries 0.
    """

    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    repetition: Float32[Array, " B"]
    presence: Float32[Array, " B"]
    frequency: Float32[Array, " B"]
    bias_ids: Int32[Array, "B NB"]
    bias_values: Float32[Array, "B NB"]


def next_width(name: str, wanted: int, widths: tuple[int, ...]) -> int:
    """The smallest of ``widths`` (ascending) that holds ``wanted``.

    Raises:
      ValueError: none does; the message calls it ``name``.
    """
    fitting = [width for width in widths if width >= wanted]
    require(bool(fitting), f"{name}={wanted} must be at most {widths[-1]}")
    return fitting[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerFlags:
    """The facts about a step's rows that choose the sampler's compiled code (static).

    Attributes:
      greedy_only: no row needs chance.
      penalties: some row uses penalties: the row state holds counts.
      bias_width: 0, 16 or 512: entries of ``bias_ids`` a row.
      num_logprobs: None: no log-probabilities; 0, 5 or 20: best tokens to report.

    Raises:
      ValueError: a width is not one of those.
    """

    greedy_only: bool = True
    penalties: bool = False
    bias_width: int = 0
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        require(
            self.bias_width in BIAS_WIDTHS,
            f"bias_width={self.bias_width} must be one of {BIAS_WIDTHS}",
        )
        require(
            self.num_logprobs is None or self.num_logprobs in LOGPROB_WIDTHS,
            f"num_logprobs={self.num_logprobs} must be None or one of {LOGPROB_WIDTHS}",
        )


def sampler_flags(
    params: Sequence[SamplingParams], *, banned: Sequence[Sequence[int]] = ()
) -> SamplerFlags:
    """The least code that serves all of a step's rows.

    Args:
      params: of each row that samples.
      banned: token ids that each row must not sample (its ends, before ``min_tokens``); may be
        shorter than ``params``.

    Raises:
      ValueError: a row has more biased and banned ids than 512.
    """
    bans = [len(ids) for ids in banned] + [0] * (len(params) - len(banned))
    biases = (len(row.bias_pairs) + bans[i] for i, row in enumerate(params))
    tops = [row.num_logprobs for row in params if row.num_logprobs is not None]
    return SamplerFlags(
        greedy_only=all(row.is_greedy for row in params),
        penalties=any(row.needs_penalties for row in params),
        bias_width=next_width("bias_width", max(biases, default=0), BIAS_WIDTHS),
        num_logprobs=next_width("num_logprobs", max(tops), LOGPROB_WIDTHS) if tops else None,
    )


def pack_inputs(
    params: Sequence[SamplingParams],
    *,
    num_rows: int,
    bias_width: int,
    banned: Sequence[Sequence[int]] = (),
) -> SamplerInputs:
    """Numpy arrays of a step's rows, padded with greedy rows to ``num_rows``.

    Args:
      params: of each row, in row order.
      num_rows: B, at least ``len(params)``.
      bias_width: NB, as in the step's ``SamplerFlags``.
      banned: as in ``sampler_flags``.

    Raises:
      ValueError: the rows or a row's biases do not fit.
    """
    require(len(params) <= num_rows, f"num_rows={num_rows} must be at least {len(params)}")

    def column(name: str, fill: float) -> np.ndarray:
        values = [getattr(row, name) for row in params]
        return np.array(values + [fill] * (num_rows - len(params)), np.float32)

    bias_ids = np.zeros((num_rows, bias_width), np.int32)
    bias_values = np.zeros((num_rows, bias_width), np.float32)
    for i, row in enumerate(params):
        ban = [(token, -np.inf) for token in (banned[i] if i < len(banned) else ())]
        pairs = [*row.bias_pairs, *ban]
        require(len(pairs) <= bias_width, f"bias_width={bias_width} must be >= {len(pairs)}")
        for j, (token, value) in enumerate(pairs):
            bias_ids[i, j], bias_values[i, j] = token, value
    top_k = [min(row.top_k, 2**31 - 1) for row in params] + [0] * (num_rows - len(params))
    columns: dict[str, Any] = {
        "temperature": column("temperature", 0.0),
        "top_k": np.array(top_k, np.int32),
        "top_p": column("top_p", 1.0),
        "min_p": column("min_p", 0.0),
        "repetition": column("repetition_penalty", 1.0),
        "presence": column("presence_penalty", 0.0),
        "frequency": column("frequency_penalty", 0.0),
        "bias_ids": bias_ids,
        "bias_values": bias_values,
    }
    return SamplerInputs(**columns)
