"""Which backend of an op runs: a named one or, with None, the best one here."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("mosaic", "triton", "xla", "reference")  # best first


def pick_backend[F: Callable[..., Any]](op: str, name: str | None, backends: Mapping[str, F]) -> F:
    """Return the op's function for a backend.

    Args:
        op: the op's name, for messages.
        name: one of `BACKEND_NAMES`, or None for the first of them in `backends`, which is then
            logged once together with the ones passed over.
        backends: the op's backends by name.

    Raises:
        ValueError: `name` is none of `BACKEND_NAMES`.
        NotImplementedError: `name` is one of them but the op does not have it.
    """
    if name is None:
        return backends[_best(op, tuple(backends))]
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; must be None or one of {', '.join(BACKEND_NAMES)}")
    if name not in backends:
        raise NotImplementedError(
            f"backend {name!r} of {op} is not available; available: {', '.join(backends)}"
        )
    return backends[name]


@functools.cache
def _best(op: str, available: tuple[str, ...]) -> str:
    picked = next(name for name in BACKEND_NAMES if name in available)
    reasons = [
        f"{name}: {'slower' if name in available else 'not available'}"
        for name in BACKEND_NAMES
        if name != picked
    ]
    logger.info("%s: picked backend %r (%s)", op, picked, "; ".join(reasons))
    return picked
