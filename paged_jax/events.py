"""The event record: how the pool was really used, as JSON lines in files that are rotated.

docs/events.md has the table of all lines. No token and no text is ever written, only counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paged_jax.blocks.events import BlockEvent
from paged_jax.config import EVENT_LOG_BYTES, EVENT_LOG_FILES, require

VERSION = 1
_FLUSH_BYTES = 64 * 1024
_FLUSH_SECONDS = 1.0
_encode = json.JSONEncoder(separators=(",", ":")).encode
_logger = logging.getLogger(__name__)


class EventLog:
    """Writes events as JSON lines, in order; a context manager.

    Lines are kept for up to a second, or 64 KiB of them, before they go to the file. A full file
    is renamed to ``path.1``, the one before to ``path.2`` and so on; an earlier record at ``path``
    is renamed likewise. When a write fails, that is logged once, the record ends there, and whoever
    tells it of events goes on undisturbed.

    >>> import tempfile
    >>> from paged_jax.blocks.block_manager import BlockManager
    >>> path = tempfile.mkdtemp() + "/events.jsonl"
    >>> with EventLog(path) as log:
    ...     manager = BlockManager(num_blocks=8, block_size=4, observer=log.take)
    ...     manager.allocate(0, num_tokens=7)
    True
    >>> for line in read_events(path):
    ...     print({key: line[key] for key in ("event", "reason", "seq", "blocks") if key in line})
    {'event': 'file'}
    {'event': 'allocate', 'reason': 'new', 'seq': 0, 'blocks': [1, 2]}

    Args:
      path: the file to write; its folder must exist.
      max_bytes: size at which a file is full.
      max_files: full files that are kept; older ones are deleted.
      about: further fields of each file's first line.
      clock: the time in seconds, from any beginning: a simulation has its own.

    Attributes:
      step: number that lines get from now on; the owner sets it.
      is_stopped: whether a write failed, or the log was closed.
      seconds: time spent in the log so far, by its clock.

    Raises:
      ValueError: ``path`` cannot be written or is a file that is not such a record, or a limit is
        too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = EVENT_LOG_BYTES,
        max_files: int = EVENT_LOG_FILES,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        require(max_bytes >= 1, f"max_bytes={max_bytes} must be >= 1")
        require(max_files >= 0, f"max_files={max_files} must be >= 0")
        self.step = 0
        self.is_stopped = False
        self.seconds = 0.0
        self._path = Path(path)
        self._max_bytes, self._max_files = max_bytes, max_files
        self._about = dict(about or {})
        self._clock = clock
        self._begin = clock()
        self._record = f"{time.time():.6f}-{os.getpid()}"
        self._buffer: list[str] = []
        self._num_buffered = 0
        self._last_flush = 0.0
        # Sequences that grew within their blocks, one after the other: they make one line.
        self._filled: list[BlockEvent] = []
        self._fill_seconds = 0.0
        self._file_number = 0
        try:
            if self._path.exists() and not (self._path.is_file() and not self._path.stat().st_size):
                _require_record(self._path)
                self._rename()
            self._start_file()
        except OSError as error:
            raise ValueError(
                f"path={str(path)!r} must be a file that can be written: {error}"
            ) from error

    def take(self, event: BlockEvent) -> None:
        """Write an event of a block manager (its ``observer``)."""
        if event.kind == "fill":
            if not self._filled:
                self._fill_seconds = self._now()
            self._filled.append(event)
            return
        begin = self._now()
        self._end_fills()
        self._add(event.kind, begin, _fields_of(event))
        self.seconds += self._now() - begin

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write a line: step, time in seconds since the record began, ``event`` and ``fields``."""
        begin = self._now()
        self._end_fills()
        # The encoded fields without their opening brace.
        self._add(event, begin, _encode(dict(fields))[1:] if fields else "}")
        self.seconds += self._now() - begin

    def flush(self) -> None:
        """Hand all lines so far to the operating system."""
        self._end_fills()
        self._last_flush = self._now()
        if not self._buffer or self.is_stopped:
            return
        try:
            with open(self._path, "ab") as file:
                file.write("".join(self._buffer).encode("ascii"))
        except OSError as error:
            self._fail(error)
            return
        self._num_written += self._num_buffered
        self._buffer.clear()
        self._num_buffered = 0

    def close(self) -> None:
        """Write what is left; later events are dropped."""
        self.flush()
        self.is_stopped = True
        self._buffer.clear()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> float:
        return self._clock() - self._begin

    def _end_fills(self) -> None:
        if self._filled:
            events, self._filled = self._filled, []
            seqs = [event.seq_id for event in events]
            tokens = [event.num_tokens for event in events]
            fields = f'"reason":"append","seqs":{seqs},"tokens":{tokens}}}'
            self._add("fill", self._fill_seconds, fields)

    def _add(self, event: str, seconds: float, fields: str) -> None:
        """Add a line; ``fields`` is the end of a JSON object with its closing brace."""
        if self.is_stopped:
            return
        comma = "," if len(fields) > 1 else ""
        line = f'{{"step":{self.step},"t":{seconds:.6f},"event":"{event}"{comma}{fields}\n'
        size = self._num_written + self._num_buffered + len(line)
        if size > self._max_bytes and self._num_written + self._num_buffered > self._header_bytes:
            self._rotate()
        self._buffer.append(line)
        self._num_buffered += len(line)
        if self._num_buffered >= _FLUSH_BYTES or seconds - self._last_flush >= _FLUSH_SECONDS:
            self.flush()

    def _rotate(self) -> None:
        self.flush()
        if self.is_stopped:
            return
        self._file_number += 1
        try:
            self._rename()
            self._start_file()
        except OSError as error:
            self._fail(error)

    def _rename(self) -> None:
        """Make room for a new file: the oldest is overwritten."""
        for number in range(self._max_files, 0, -1):
            older = _numbered(self._path, number - 1)
            if older.exists():
                os.replace(older, _numbered(self._path, number))

    def _start_file(self) -> None:
        header = {
            "event": "file",
            "version": VERSION,
            "record": self._record,
            "file": self._file_number,
            "time": time.time(),
        }
        line = _encode(header | self._about) + "\n"
        with open(self._path, "wb") as file:
            file.write(line.encode("ascii"))
        self._header_bytes = self._num_written = len(line)

    def _fail(self, error: OSError) -> None:
        self.is_stopped = True
        self._buffer.clear()
        _logger.warning("the event record %s ends here: %s", self._path, error)


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the newest record at ``path`` in order, rotated files first.

    The last line of a process that was killed may be incomplete; it is left out, and so are files
    of the record that are gone: both are logged.

    Args:
      path: as for ``EventLog``.

    Yields:
      Each line's fields; the first line of each file has the event "file".

    Raises:
      ValueError: there is no record at ``path``, or a line in the middle cannot be read.
    """
    newest = _require_record(Path(path))
    files = [Path(path)]
    for number in range(1, newest["file"] + 1):
        older = _numbered(Path(path), number)
        with contextlib.suppress(ValueError):
            if _require_record(older)["record"] == newest["record"]:
                files.insert(0, older)
    num_missing = newest["file"] + 1 - len(files)
    if num_missing:
        _logger.warning("%s: the first %d files of the record are gone", path, num_missing)
    for file in files:
        yield from _read_file(file)


def block_events(line: Mapping[str, Any]) -> list[BlockEvent]:
    """A line's events of the block manager, for ``BlockReplay``; none for lines of other kinds.

    Raises:
      ValueError: a field is missing.
    """
    kind = line.get("event")
    try:
        if kind == "fill":
            pairs = zip(line["seqs"], line["tokens"], strict=True)
            return [BlockEvent(kind, line["reason"], seq, num_tokens=n) for seq, n in pairs]
        if "blocks" not in line:
            return []
        return [
            BlockEvent(
                line["event"],
                line["reason"],
                line.get("seq"),
                line["blocks"],
                line.get("to", ()),
                line.get("tokens"),
                line.get("parent"),
                line.get("pin"),
            )
        ]
    except KeyError as error:
        raise ValueError(f"line={dict(line)} must have {error}") from error


def _read_file(file: Path) -> Iterator[dict[str, Any]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                _logger.warning("%s: line %d is incomplete and left out", file, number)
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}: line {number} must be JSON: {error}") from error


def _require_record(path: Path) -> dict[str, Any]:
    """The fields of a record's first line.

    Raises:
      ValueError: ``path`` is not such a file.
    """
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(2**16))
        is_record = header["event"] == "file" and header["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"path={str(path)!r} must be an event record, it is left as it is: {error}"
        ) from error
    require(is_record, f"path={str(path)!r} must be an event record of version {VERSION}: {header}")
    return header


def _fields_of(event: BlockEvent) -> str:
    """The end of a block event's JSON object: written by hand, as it is the most frequent one."""
    fields = f'"reason":{_encode(event.reason)}'
    for name, value in (
        ("seq", event.seq_id),
        ("pin", event.pin_id),
        ("parent", event.parent_id),
        ("tokens", event.num_tokens),
    ):
        if value is not None:
            fields += f',"{name}":{value}'
    fields += f',"blocks":{list(event.blocks)}'
    return fields + (f',"to":{list(event.to)}}}' if event.to else "}")


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path
