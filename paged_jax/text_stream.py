"""Text from tokens as they come: whole characters, cut at stop strings (host only)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from paged_jax.config import require


class _StopMatcher:
    """Follows one stop string through the text, a character at a time (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # characters at the end of the text that begin the stop string
        # _fallback[n]: the longest proper prefix of the stop string that ends its first n.
        self._fallback = [0, 0]
        for i in range(1, len(stop)):
            self._fallback.append(self._longer(self._fallback[i], stop[i]))

    def _longer(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length]
        return length + (self.stop[length] == char)

    def advance(self, char: str) -> bool:
        """Take one more character; whether the whole stop string now ends the text."""
        self.length = self._longer(self.length, char)
        return self.length == len(self.stop)


class TextStream:
    """One sequence's text, given out piece by piece.

    The pieces together are always the final text. A character is given out once its bytes are
    complete; bytes that are no UTF-8 become U+FFFD as soon as that is certain. The text ends at
    the stop string that is complete first, whatever the tokens' boundaries; of several complete
    at the same character, the longest counts, so the text is cut at the earliest start. Text
    that may be the beginning of a stop string is held back until it is known not to be, or
    until ``finish``. Only text is cut: the ids of the tokens so far, the one that completes a
    stop string included, are the caller's to report.

    Args:
      token_bytes: the bytes that a token id stands for, for example a tokenizer's
        ``token_bytes``.
      stop: strings that end the text.
      include_stop: leave the matched stop string in the text.
      min_tokens: text of the first so many tokens never completes, nor begins, a stop string.

    Raises:
      ValueError: a stop string is empty.

    >>> stream = TextStream([b"ab", b"cd", b"ef"].__getitem__, stop=("bcd",))
    >>> stream.push(0), stream.push(1), stream.stopped
    ('a', '', 'bcd')
    >>> stream.text
    'a'
    """

    __slots__ = (
        "_decoder",
        "_finished",
        "_held",
        "_include_stop",
        "_matchers",
        "_num_unchecked",
        "_pieces",
        "_stopped",
        "_token_bytes",
    )

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        require(
            not isinstance(stop, str) and all(stop),
            f"stop={stop!r} must be a sequence of strings, none of them empty",
        )
        self._token_bytes = token_bytes
        self._include_stop = include_stop
        self._num_unchecked = min_tokens
        self._matchers = [_StopMatcher(string) for string in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, not given out: may begin a stop string
        self._pieces: list[str] = []
        self._stopped: str | None = None
        self._finished = False

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain.

        After a stop, further tokens are ignored: a step in flight may still bring one.

        Raises:
          RuntimeError: called after ``finish``.
        """
        if self._finished:
            raise RuntimeError(f"token {token_id} pushed after finish(), text {self.text!r}")
        if self._stopped is not None:
            return ""
        new = self._decoder.decode(self._token_bytes(token_id))
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return self._give(new)
        return self._take(new)

    def finish(self) -> str:
        """End the text; returns what was held back. A second call returns nothing."""
        if self._finished:
            return ""
        self._finished = True
        if self._stopped is not None:
            return ""
        # An incomplete character becomes U+FFFD, and may complete a stop string.
        delta = self._take(self._decoder.decode(b"", final=True))
        if self._stopped is None:
            delta += self._give(self._held)
        self._held = ""
        return delta

    def _give(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _take(self, new: str) -> str:
        if not self._matchers:
            return self._give(new)
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            # A list, not a generator: every matcher must see every character.
            complete = [match.stop for match in self._matchers if match.advance(char)]
            if complete:
                self._stopped = max(complete, key=len)
                self._held = ""
                cut = end if self._include_stop else end - len(self._stopped)
                return self._give(text[:cut])
        num_held = max(match.length for match in self._matchers)
        self._held = text[len(text) - num_held :]
        return self._give(text[: len(text) - num_held])
