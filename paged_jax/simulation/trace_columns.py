"""The columns of the traces that are known, and how their values are read."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Callable, Collection, Mapping

IDS = "hash_ids"
_MAX_ID = 2**40  # times the tokens of a block it must still be an int64
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class Column[T]:
    """A column that a format has.

    Attributes:
      name: in the file.
      read: makes a value of what stands there; TypeError, ValueError or OverflowError if it cannot.
      must_be: what it can read, for messages.
    """

    name: str
    read: Callable[[object], T]
    must_be: str

    def take(self, record: Mapping[str, object]) -> T:
        """A row's value.

        Raises:
          ValueError: it is missing, or not what it must be.
        """
        if self.name not in record:
            raise ValueError(f"{self.name} is missing, it must be {self.must_be}")
        try:
            return self.read(record[self.name])
        except (TypeError, ValueError, OverflowError) as error:
            shown = shorten(record[self.name])
            raise ValueError(f"{self.name}={shown} must be {self.must_be}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns of one kind of trace.

    Attributes:
      prompt: prompt tokens.
      output: output tokens.
      arrival: when the request came, in ticks.
      ticks_per_second: unit of the arrivals.
      is_timed: whether there must be arrivals; without them all requests come at once.
    """

    prompt: Column[int]
    output: Column[int]
    arrival: Column[float]
    ticks_per_second: int
    is_timed: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Columns by which it is known."""
        lens = (self.prompt.name, self.output.name)
        return (self.arrival.name, *lens) if self.is_timed else lens


def find_format(columns: Collection[str]) -> Format:
    """The first format whose columns are among these.

    Raises:
      ValueError: there is none.
    """
    for one in _FORMATS:
        if set(one.names).issubset(columns):
            return one
    known = "; or ".join(", ".join(one.names) for one in _FORMATS)
    raise ValueError(f"columns {shorten(list(columns))} must include {known}")


def read_ids(value: object, *, most: int) -> tuple[int, ...]:
    """Block ids from a list, or from text with ranges.

    Args:
      value: what stands in the file.
      most: ids that there may be, known before a range is written out.

    Raises:
      ValueError: it is something else, or too long.
    """
    try:
        if isinstance(value, str):
            ranges = [_read_range(part) for part in value.split()]
        elif isinstance(value, list):
            ranges = [range(one, one + 1) for one in map(_read_whole, value)]
        else:
            raise TypeError
        if sum(map(len, ranges)) > most or not all(ids and ids[-1] < _MAX_ID for ids in ranges):
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{IDS}={shorten(value)} must be ids below 2**40 and rising ranges of them, as in "
            f"'0 14-27', at most one a prompt token ({most})"
        ) from error
    return tuple(itertools.chain.from_iterable(ranges))


def shorten(value: object) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _read_range(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(_read_whole(first), _read_whole(last if dash else first) + 1)


def _read_whole(value: object) -> int:
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.isdecimal()):
            raise ValueError
        return int(text)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError
    return value


def _read_length(value: object) -> int:
    length = _read_whole(value)
    if length < 1:
        raise ValueError
    return length


def _read_number(value: object) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool) or "_" in str(value):
        raise ValueError
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError
    return number


def _read_date(value: object) -> int:
    """Microseconds since 1970, whole so that differences are exact; UTC where it names no zone."""
    if not isinstance(value, str):
        raise TypeError
    date = datetime.datetime.fromisoformat(value.strip())
    date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
    return (date - _EPOCH) // datetime.timedelta(microseconds=1)


def _lengths(name: str) -> Column[int]:
    return Column(name, _read_length, "an integer >= 1")


def _numbers(name: str) -> Column[float]:
    return Column(name, _read_number, "a number >= 0")


_FORMATS = (
    Format(
        prompt=_lengths("prompt_tokens"),
        output=_lengths("output_tokens"),
        arrival=_numbers("arrival_s"),
        ticks_per_second=1,
        is_timed=False,
    ),
    Format(
        prompt=_lengths("ContextTokens"),
        output=_lengths("GeneratedTokens"),
        arrival=Column("TIMESTAMP", _read_date, "a time as in '2023-11-16 18:17:03.9799600'"),
        ticks_per_second=1_000_000,
        is_timed=True,
    ),
    Format(
        prompt=_lengths("input_length"),
        output=_lengths("output_length"),
        arrival=_numbers("timestamp"),
        ticks_per_second=1000,
        is_timed=True,
    ),
    Format(
        prompt=_lengths("num_prefill_tokens"),
        output=_lengths("num_decode_tokens"),
        arrival=_numbers("arrived_at"),
        ticks_per_second=1,
        is_timed=False,
    ),
)
