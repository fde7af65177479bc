"""Drafts by prompt lookup: what followed the last time the same few tokens stood there.

No second model: text that repeats itself or its prompt (code, lists, quotations, summaries) is
its own draft. The idea is A. Saxena's "prompt lookup decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable

from paged_jax.config import NgramSpeculation
from paged_jax.scheduling.sequence import Sequence


class NgramIndex:
    """Where each n-gram of a growing token list ended last; O(1) for each new token.

    Args:
      min_len: shortest n-gram that is looked up.
      max_len: longest.

    >>> index = NgramIndex(min_len=2, max_len=3)
    >>> index.extend([7, 1, 2, 3, 4, 5, 1, 2])
    >>> index.continuation(limit=3)
    [3, 4, 5]
    """

    __slots__ = ("_ends", "_tokens")

    def __init__(self, *, min_len: int, max_len: int) -> None:
        self._tokens: list[int] = []
        # Longest first; an n-gram is entered when the token after it is known.
        lens = range(max_len, min_len - 1, -1)
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in lens]

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens at the end."""
        tokens = self._tokens
        for token in token_ids:
            end = len(tokens)
            for n, ends in self._ends:
                if n <= end:
                    ends[tuple(tokens[end - n :])] = end
            tokens.append(token)

    def continuation(self, *, limit: int) -> list[int]:
        """What followed the most recent earlier occurrence of the longest known ending.

        Where that runs into the present, it goes on as if the text were periodic.

        Args:
          limit: most tokens.

        Returns:
          ``limit`` tokens, or none if no ending occurred before.
        """
        tokens = self._tokens
        for n, ends in self._ends:
            begin = ends.get(tuple(tokens[-n:]))
            if begin is not None:
                found = tokens[begin : begin + limit]
                return [found[i % len(found)] for i in range(limit)]
        return []


class NgramDrafter:
    """Proposes each sequence's own earlier continuation, by an index kept for each.

    Args:
      settings: how many tokens, after n-grams of which lengths.
    """

    __slots__ = ("_indices", "_settings")

    def __init__(self, settings: NgramSpeculation) -> None:
        self._settings = settings
        self._indices: dict[Sequence, NgramIndex] = {}

    def propose(self, sequence: Sequence, *, limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the sequence's known ones."""
        settings, index = self._settings, self._indices.get(sequence)
        if index is None:
            index = NgramIndex(min_len=settings.min_ngram_len, max_len=settings.max_ngram_len)
            index.extend(sequence.prompt_token_ids)
            self._indices[sequence] = index
        num_indexed = index.num_tokens - len(sequence.prompt_token_ids)
        index.extend(sequence.output_token_ids[num_indexed:])
        return index.continuation(limit=min(limit, settings.num_draft_tokens))

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._indices.pop(sequence, None)
