"""The ops' own JAX settings: what their callers chose for rank promotion and 64 bits ends here."""

import functools
from collections.abc import Callable

import jax


def broadcasts[**P, R](op: Callable[P, R]) -> Callable[P, R]:
    """Let an op be called where rank promotion is an error, or 64-bit types are the default.

    The ops work on arrays of 32 bits and fewer; a Python integer must not widen an index.
    """

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
            return op(*args, **kwargs)

    return call
