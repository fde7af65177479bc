"""An iterator over some requests' outputs that never leaves a request behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from paged_jax.outputs import RequestOutput


class OutputStream(Iterator[RequestOutput]):
    """Outputs of some requests, in the order in which steps yield them.

    Closing it (or leaving a ``with`` block, or dropping it) cancels the requests that still run,
    even when it was never iterated.

    Args:
      request_ids: the requests to follow.
      step: advances all requests until these have outputs; none when they have all ended and
        someone else was given their last outputs.
      discard: cancels requests and forgets their outputs.
    """

    __slots__ = ("_buffer", "_discard", "_remaining", "_step")

    def __init__(
        self,
        request_ids: Iterable[str],
        *,
        step: Callable[[set[str]], list[RequestOutput]],
        discard: Callable[[set[str]], None],
    ) -> None:
        self._remaining = set(request_ids)
        self._step = step
        self._discard = discard
        self._buffer: deque[RequestOutput] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        if not self._buffer and self._remaining:
            self._buffer.extend(self._step(self._remaining))
        if not self._buffer:
            self._remaining = set()
            raise StopIteration
        output = self._buffer.popleft()
        if output.finished:
            self._remaining.discard(output.request_id)
        return output

    def close(self) -> None:
        """Cancel what is left; nothing is yielded any more."""
        if self._remaining:
            self._discard(self._remaining)
        self._remaining = set()
        self._buffer.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
