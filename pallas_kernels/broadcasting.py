"""The ops broadcast freely inside, whatever `jax_numpy_rank_promotion` their callers chose."""

import functools
from collections.abc import Callable

import jax


def broadcasts[**P, R](op: Callable[P, R]) -> Callable[P, R]:
    """Let an op be called where rank promotion is an error, as in JAX's own tests."""

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"):
            return op(*args, **kwargs)

    return call
