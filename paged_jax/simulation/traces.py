"""Serving traces as CSV files: lengths, and the ids of prompt blocks where a trace has them."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      num_prompt: prompt tokens.
      num_output: output tokens.
      prefix_ids: one id a prompt block, the partly filled last one too; equal ids are equal blocks
        after equal beginnings. Empty where the trace has none.
      arrival: seconds from the trace's beginning.
    """

    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()
    arrival: float = 0.0

    def token_ids(self, block_size: int) -> list[int]:
        """A prompt in which each id stands for ``block_size`` tokens that no other id has."""
        ids = np.asarray(self.prefix_ids, np.int64)[:, None] * block_size + np.arange(block_size)
        return ids.ravel()[: self.num_prompt].tolist()


def read_trace(
    path: str | Path, *, max_requests: int | None = None, divide_by: int = 1
) -> list[TraceRequest]:
    """Read a trace in its own order.

    Args:
      path: CSV with the columns ``prompt_tokens`` and ``output_tokens``, and perhaps ``hash_ids``:
        ids and ranges of ids, as in ``0 14-27``.
      max_requests: stop after this many.
      divide_by: lengths become that many times shorter, rounded up, so that a trace of long blocks
        becomes one of short blocks with the same ids.

    Raises:
      ValueError: the file has no request, or not these columns.
    """
    requests: list[TraceRequest] = []
    with Path(path).open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            if max_requests is not None and len(requests) == max_requests:
                break
            try:
                num_prompt, num_output = int(record["prompt_tokens"]), int(record["output_tokens"])
                ids = _unrange(record.get("hash_ids") or "")
            except (KeyError, TypeError, ValueError) as error:
                message = f"path={str(path)!r} must have whole prompt_tokens and output_tokens, "
                raise ValueError(f"{message}and hash_ids like '0 14-27', not {record}") from error
            requests.append(
                TraceRequest(-(-num_prompt // divide_by), -(-num_output // divide_by), ids)
            )
    if not requests:
        raise ValueError(f"path={str(path)!r} must hold at least one request")
    return requests


def _unrange(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return tuple(ids)
