"""Text files as rows of tokens, and the order in which a run sees them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from paged_jax.config import require
from paged_jax.model import Tokenizer


def read_documents(paths: Sequence[str | os.PathLike[str]], *, separator: str) -> list[str]:
    """Return the texts of all files, in order.

    Args:
      paths: UTF-8 text files.
      separator: what stands between two texts of a file; white space around it is dropped. "": a
        file is one text.

    Raises:
      ValueError: a file holds no text, or is not UTF-8; the message names it.
    """
    documents = []
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: must be UTF-8 text: {error}") from error
        parts = text.split(separator) if separator else [text]
        found = [part.strip() for part in parts if part.strip()]
        require(bool(found), f"{path}: must hold text, there is none")
        documents += found
    return documents


def tokenize(
    documents: Sequence[str], tokenizer: Tokenizer, *, end_id: int, vocab_size: int
) -> Int[np.ndarray, "N"]:
    """Return all documents as one stream of token ids, the end token after each.

    Raises:
      ValueError: the tokenizer makes ids that the model does not have.
    """
    parts = [np.array([*tokenizer.encode(text), end_id], np.int32) for text in documents]
    stream = np.concatenate(parts)
    require(
        int(stream.max()) < vocab_size,
        f"the tokenizer's id {stream.max()} must lie in the model's vocabulary, [0, {vocab_size})",
    )
    return stream


def split_off(
    stream: Int[np.ndarray, "N"], *, share: float, end_id: int
) -> tuple[Int[np.ndarray, "A"], Int[np.ndarray, "B"]]:
    """Cut off the stream's last part, between two documents where that can be.

    Args:
      stream: token ids.
      share: of the tokens that are cut off, above 0 and below 1.
      end_id: the token after each document.
    """
    require(0 < share < 1, f"eval_share={share} must lie between 0 and 1")
    cut = round(len(stream) * (1 - share))
    ends = cut + np.flatnonzero(stream[cut:-1] == end_id)
    cut = int(ends[0]) + 1 if len(ends) else cut
    return stream[:cut], stream[cut:]


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """A stream cut into rows; a row's last token is the next one's first.

    Attributes:
      stream: token ids.
      seq_len: tokens that a row predicts (T): it has one more.
      name: of the argument that it came from, for messages.

    Raises:
      ValueError: there are too few tokens for one row.
    """

    stream: Int[np.ndarray, "N"]
    seq_len: int
    name: str

    def __post_init__(self) -> None:
        require(
            len(self) > 0,
            f"{self.name} must have more than seq_len={self.seq_len} tokens, it has "
            f"{len(self.stream)}",
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return (len(self.stream) - 1) // self.seq_len

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256(self.stream.astype("<i4").tobytes()).hexdigest()

    def take(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B T+1"]:
        """Return rows by their numbers."""
        starts = np.asarray(indices)[:, None] * self.seq_len
        return self.stream[starts + np.arange(self.seq_len + 1)]

    def batch_of(self, step: int, *, batch_size: int, seed: int) -> Int[np.ndarray, "B T+1"]:
        """Return the rows of an update: a function of its number, so that nothing must be stored.

        Every epoch has an order of its own, and leaves out what does not fill a batch.

        Args:
          step: number of the update, from 0 on.
          batch_size: rows (B), at most ``len(self)``.
          seed: of the orders.
        """
        epoch, index = divmod(step, len(self) // batch_size)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(self))
        return self.take(order[index * batch_size : (index + 1) * batch_size])

    def batches(self, batch_size: int) -> Iterator[Int[np.ndarray, "B T+1"]]:
        """Yield all rows in order; the last batch may have fewer."""
        for start in range(0, len(self), batch_size):
            yield self.take(np.arange(start, min(start + batch_size, len(self))))
