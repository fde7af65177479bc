"""Greedy decoding over a zoo's own cache, a token at a time, to compare with (``compare``)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """What a dense cache yielded.

    Attributes:
      token_ids: generated tokens, a list a request.
      logits: of every step of a request, ``[steps, V]`` each, a list a request.
      cache_nbytes: most bytes that the cache held at once.
      seconds: wall time, compilation excluded.
    """

    token_ids: list[list[int]]
    logits: list[np.ndarray]
    cache_nbytes: int
    seconds: float


class Baseline(Protocol):
    """Greedy decoding over a cache that is not this library's: the zoo's own."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], /
    ) -> BaselineRun:
        """Decode ``max_tokens[i]`` tokens after ``prompts[i]``, end tokens ignored."""
        ...


InitCache = Callable[[int, int], Any]
Step = Callable[[Any, Int[Array, "B 1"], Int[Array, ""]], tuple[Float[Array, "B V"], Any]]


def lockstep_baseline(init_cache: InitCache, step: Step) -> Baseline:
    """Make a baseline of a model's own decode step.

    All requests start at once and stand at the same position in every step, which is all that a
    cache with one index for the whole batch can do: a row is fed its prompt token by token, then
    what it generated, until the longest row has ended. Any zoo's cache can do it, of prompts of
    any lengths, and no row sees padding.

    Args:
      init_cache: ``init_cache(num_rows, capacity)``, an empty cache for that many tokens a row.
      step: ``step(cache, tokens, position) -> (logits, cache)``, jit-compiled here, the cache
        donated.
    """

    def next_tokens(cache: Any, tokens: Array, position: Array) -> tuple[Array, Array, Any]:
        logits, cache = step(cache, tokens, position)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits.astype(jnp.float32), cache

    compiled = jax.jit(next_tokens, donate_argnums=0)

    def run(prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], /) -> BaselineRun:
        lens = np.array([len(prompt) for prompt in prompts])
        ends = lens + np.array(max_tokens)
        ids = np.zeros((len(prompts), int(ends.max())), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        # The last token of a row is made, and never fed.
        num_steps = int(ends.max()) - 1
        cache = init_cache(len(prompts), num_steps)
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        # Twice the first step, before the clock: what compiled for the given cache, and for its
        # own result, may be two programs.
        for _ in range(2):
            _, _, cache = compiled(cache, ids[:, :1], np.int32(0))
        cache = init_cache(len(prompts), num_steps)
        kept: list[Array] = []
        begin = time.perf_counter()
        for position in range(num_steps):
            made, logits, cache = compiled(
                cache, ids[:, position : position + 1], np.int32(position)
            )
            is_open = position + 1 >= lens
            ids[is_open, position + 1] = np.asarray(made)[is_open]
            kept.append(logits)
        seconds = time.perf_counter() - begin
        steps = np.stack([np.asarray(logits) for logits in kept], axis=1)  # [B, steps, V]
        return BaselineRun(
            token_ids=[
                ids[row, start:end].tolist()
                for row, (start, end) in enumerate(zip(lens, ends, strict=True))
            ],
            logits=[
                steps[row, start - 1 : end - 1]
                for row, (start, end) in enumerate(zip(lens, ends, strict=True))
            ],
            cache_nbytes=nbytes,
            seconds=seconds,
        )

    return run
