"""Which backend of an op runs: a named one or, with None, the best one that takes the call."""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.devices import Device, current_device, kernel_device

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("mosaic", "triton", "xla", "reference")  # best first
GPU_BACKENDS = ("mosaic", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of an op.

    Attributes:
        run: the function; GPU backends also take `interpret`.
        unsupported: says of a call, `(call, device)`, why `run` cannot take it, or None if it can.
            `call` is the op's own record of shapes and dtypes.
    """

    run: Callable[..., Any]
    unsupported: Callable[[Any, Device], str | None] = lambda call, device: None


def gpu_backend(module: str, function: str) -> Backend:
    """Load a GPU backend, or one that says that this JAX no longer ships what it is written in.

    Args:
        module: its module, which also has `unsupported`.
        function: the name of its `run`.
    """
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        reason = f"this JAX does not ship it ({error})"
        return Backend(run=_refuse, unsupported=lambda call, device: reason)
    return Backend(run=getattr(loaded, function), unsupported=loaded.unsupported)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a backend that cannot be imported")


# Loaders, so that nothing imports Pallas (a second of start-up) where no GPU kernel runs.
type Backends = Mapping[str, Callable[[], Backend]]


def pick_backend(
    op: str, name: str | None, backends: Backends, call: Any, *, interpret: bool = False
) -> Callable[..., Any]:
    """Return the function of a backend that takes the call.

    Args:
        op: the op's name, for messages.
        name: one of `BACKEND_NAMES`, which is then used or refused, or None for the first of them
            that takes the call; what was picked and why not the others is logged once.
        backends: a loader for each of the op's backends.
        call: shapes and dtypes of the call, hashable, as the op's backends know it.
        interpret: run GPU kernels in Pallas's interpreter, on any device (for tests; slow).

    Raises:
        ValueError: `name` is none of `BACKEND_NAMES`.
        NotImplementedError: the named backend cannot take the call; the message says why.
    """
    if name is not None and name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; must be None or one of {', '.join(BACKEND_NAMES)}")
    reasons = []
    for candidate in BACKEND_NAMES if name is None else (name,):
        reason, run = _try(candidate, backends, call, interpret)
        if run is None:
            reasons.append(f"{candidate}: {reason}")
            continue
        if name is None:
            _log_once(op, candidate, tuple(reasons))
        if candidate in GPU_BACKENDS:
            return functools.partial(run, interpret=interpret)
        return run
    raise NotImplementedError(f"backend of {op}: {'; '.join(reasons)}")


def _try(
    name: str, backends: Backends, call: Any, interpret: bool
) -> tuple[str, None] | tuple[None, Callable[..., Any]]:
    """The backend's function, or why it cannot take the call."""
    if name not in backends:
        return "the op has no such backend", None
    device = current_device()
    if name in GPU_BACKENDS and not device.is_cuda:
        if not interpret:
            return f"needs an NVIDIA GPU (here: {device.platform}), or interpret=True", None
        device = kernel_device()
    backend = backends[name]()
    reason = backend.unsupported(call, device)
    return (reason, None) if reason is not None else (None, backend.run)


@functools.cache
def _log_once(op: str, picked: str, reasons: tuple[str, ...]) -> None:
    logger.info("%s: picked backend %r (%s)", op, picked, "; ".join(reasons) or "the best")
