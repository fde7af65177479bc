"""Serving traces from files: when requests came, how long they were, which blocks they shared."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paged_jax.simulation.trace_columns import IDS, find_format, read_ids, shorten

_GZIP_MAGIC = b"\x1f\x8b"


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
    """Read a trace in its own order: CSV or JSON lines, plain or gzip (docs/replay.md).

    Arrivals count from the first row. Blank lines and columns of no use are passed over.

    Args:
      path: the file; its columns tell which of the known formats it has.
      max_requests: stop after this many; what follows is not looked at.
      divide_by: lengths become that many times shorter, rounded up, so that a trace of long blocks
        becomes one of short blocks with the same ids.

    Raises:
      ValueError: the file has no request, its columns are of no known format, or a row is not what
        it must be (the message names file, line, column and value); or a number is not positive.
    """
    for name, value in (("max_requests", max_requests), ("divide_by", divide_by)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    with Path(path).open("rb") as file:
        is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        lines = _Lines(gzip.GzipFile(fileobj=file) if is_gzip else file)
        try:
            requests = list(itertools.islice(_read_requests(lines, divide_by), max_requests))
        except (ValueError, csv.Error, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"path={str(path)!r}, line {lines.number}: {error}") from error
    if not requests:
        raise ValueError(f"path={str(path)!r} must hold at least one request")
    return requests


def find_tokens_per_id(requests: Sequence[TraceRequest]) -> int | None:
    """How many tokens an id stands for: a power of two if one agrees with all lengths.

    Where several numbers agree, the least. None where no request has ids.

    >>> find_tokens_per_id([TraceRequest(6758, 1, tuple(range(14)))])
    512

    Raises:
      ValueError: no number agrees with all.
    """
    lens = [(one.num_prompt, len(one.prefix_ids)) for one in requests if one.prefix_ids]
    if not lens:
        return None
    # A prompt of p tokens in blocks of s has n = ceil(p / s) ids.
    least = max(-(-num_prompt // num_ids) for num_prompt, num_ids in lens)
    most = min(
        ((num_prompt - 1) // (num_ids - 1) for num_prompt, num_ids in lens if num_ids > 1),
        default=math.inf,
    )
    if least > most:
        raise ValueError(
            f"{IDS} must have one id a block: a request has at least {least} tokens an id, one at "
            f"most {most} (too few, where lengths were divided by more than a block)"
        )
    power = 1 << (least - 1).bit_length()
    return power if power <= most else least


class _Lines:
    """The lines of a file that are not blank; ``number`` is the last one's, from 1."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        while True:
            self.number += 1
            line = self._file.readline()
            if not line:
                return
            try:
                text = line.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{shorten(line)} must be UTF-8 text") from error
            if text.strip():
                yield text


def _read_requests(lines: Iterable[str], divide_by: int) -> Iterator[TraceRequest]:
    columns, records = _read_records(iter(lines))
    if not columns:
        return
    found = find_format(columns)
    optional = (found.arrival.name, IDS)
    first = last = -math.inf
    for record in records:
        for name in optional:
            if (name in record) != (name in columns):
                raise ValueError(f"{name} must be in all rows or in none")
        num_prompt, num_output = found.prompt.take(record), found.output.take(record)
        ids = read_ids(record[IDS], most=num_prompt) if IDS in columns else ()
        ticks = found.arrival.take(record) if found.arrival.name in columns else 0
        if ticks < last:
            shown = shorten(record[found.arrival.name])
            raise ValueError(f"{found.arrival.name}={shown} must not be before the row above's")
        first, last = (ticks if last == -math.inf else first), ticks
        arrival = (ticks - first) / found.ticks_per_second
        yield TraceRequest(-(-num_prompt // divide_by), -(-num_output // divide_by), ids, arrival)


def _read_records(
    lines: Iterator[str],
) -> tuple[Sequence[str], Iterator[Mapping[str, object]]]:
    """The columns' names, none for an empty file, and the rows by these names."""
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    if first.lstrip().startswith("{"):
        return list(_read_json(first)), map(_read_json, lines)
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    columns = [name.strip() for name in next(reader)]
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise ValueError(f"columns {repeated} must each be there once")
    return columns, (_name_values(columns, values) for values in reader)


def _read_json(line: str) -> Mapping[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shorten(line)} must be a JSON object on one line: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{shorten(line)} must be a JSON object on one line")
    return record


def _name_values(columns: Sequence[str], values: Sequence[str]) -> Mapping[str, str]:
    if len(values) < len(columns):
        raise ValueError(f"{columns[len(values)]} is missing: {shorten(values)} must have a value")
    if len(values) > len(columns):
        raise ValueError(f"{shorten(values)} must have one value a column ({len(columns)})")
    return dict(zip(columns, values, strict=True))
