"""The process that touches the GPU: takes items in order, compiles a few at a time, runs each.

A kernel that was never run can hang or take the CUDA context with it. So what begins is recorded
before it begins, and `supervisor` starts a new worker after what was fatal.
"""

import concurrent.futures
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .records import Budget, RecordFile

GROUP_SIZES = {"speed": 4, "step": 4}  # whose items have several or long programs
MAX_REASON = 600  # characters of an error that are kept
EXIT_LOST_DEVICE = 42


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What items need to know.

    Attributes:
        rehearsal: toy sizes on a CPU, GPU kernels in the interpreter.
        backends: GPU and XLA backends to check, by name.
        excluded: contenders that were fatal before.
        budget: of the whole run.
        records: where facts go.
    """

    rehearsal: bool
    backends: tuple[str, ...]
    excluded: frozenset[str]
    budget: Budget
    records: RecordFile

    def phase(self, item_id: str, contender: str) -> None:
        """Record who is to blame if the process dies now."""
        self.records.append("phase", item=item_id, contender=contender)


type Programs = dict[str, Any]  # compiled, or the exception of its compilation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Programs to compile, and what to do with them: `run` returns the fields of the result."""

    programs: dict[str, jax.stages.Lowered]
    run: Callable[[Programs], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to check or measure.

    Attributes:
        item_id: unique, the same in every worker.
        section: one of `records.SECTIONS`.
        contender: the backend it is about, or "" for several.
        prepare: traces and lowers; may raise NotImplementedError, the reason why it cannot be.
    """

    item_id: str
    section: str
    contender: str = ""
    prepare: Callable[[], Prepared]


class LostDeviceError(Exception):
    """The device answers no more; a new process is needed."""


def work(items: Iterable[Item], context: Context, *, threads: int) -> None:
    """Do every item that has no result yet.

    Args:
        items: in order of value.
        context: settings.
        threads: compilations at a time.

    Raises:
        LostDeviceError: after an item whose result is recorded, or in a phase of one.
    """
    done = {result["item"] for result in context.records.results()}
    pending = [item for item in items if item.item_id not in done]
    for group in _groups(pending, threads):
        room = [item for item in group if context.budget.has_room(item.section)]
        for item in group:
            if item.contender in context.excluded:
                record(context, item, status="skipped", reason=f"{item.contender} was fatal before")
            elif item not in room:
                record(context, item, status="skipped", reason="time budget")
        _do_group([i for i in room if i.contender not in context.excluded], context, threads)


def record(context: Context, item: Item, **fields: Any) -> None:
    """Record and print an item's result."""
    context.records.append(
        "result", item=item.item_id, section=item.section, contender=item.contender, **fields
    )
    shown = {k: v for k, v in fields.items() if k in ("status", "reason", "note") and v}
    print(f"{item.item_id}: {' '.join(str(value) for value in shown.values())}", flush=True)


def _groups(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    """Neighbours of one section, at most `size` of them."""
    group: list[Item] = []
    for item in items:
        section = group[0].section if group else item.section
        if section != item.section or len(group) == min(size, GROUP_SIZES.get(section, size)):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _do_group(group: list[Item], context: Context, threads: int) -> None:
    if len(group) > 1:
        context.records.append("compiling", items=[item.item_id for item in group])
    elif group:
        context.records.append("begin", item=group[0].item_id, contender=group[0].contender)
    ready: list[tuple[Item, Prepared]] = []
    for item in group:
        try:
            ready.append((item, item.prepare()))
        except NotImplementedError as error:
            record(context, item, status="unsupported", reason=_short(error))
        except Exception as error:  # a kernel that does not lower is a result, not the end
            record(context, item, status="fail", reason=_short(error), trace=_trace(error))
    compiled = compile_all([prepared.programs for _, prepared in ready], threads=threads)
    for (item, prepared), programs in zip(ready, compiled, strict=True):
        context.records.append("begin", item=item.item_id, contender=item.contender)
        start = time.perf_counter()
        try:
            if not context.budget.has_room(item.section):
                fields = {"status": "skipped", "reason": "time budget"}
            else:
                fields = prepared.run(programs)
        except LostDeviceError:  # the last phase says with whom: the supervisor tries again
            raise
        except NotImplementedError as error:
            fields = {"status": "unsupported", "reason": _short(error)}
        except Exception as error:
            fields = {"status": "fail", "reason": _short(error), "trace": _trace(error)}
        record(context, item, seconds=round(time.perf_counter() - start, 3), **fields)
        if fields["status"] == "fail" and not device_answers():
            raise LostDeviceError(item.item_id)


def lower(function: Any, *args: Any) -> jax.stages.Lowered:
    """Lower a jitted function for the device here or, under an abstract mesh, for the GPU that it
    names: so that every program of a run can be lowered where there is no GPU.
    """
    traced = function.trace(*args)
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is None:
        return traced.lower()
    return traced.lower(lowering_platforms=("cuda",))


def compile_all(
    programs: Sequence[dict[str, jax.stages.Lowered]], *, threads: int
) -> list[Programs]:
    """Compile each program once (several may be the same object), a few at a time."""
    lowered = {id(x): x for group in programs for x in group.values()}
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        compiled = dict(zip(lowered, pool.map(_compile, lowered.values()), strict=True))
    return [{name: compiled[id(x)] for name, x in group.items()} for group in programs]


def _compile(lowered: jax.stages.Lowered) -> Any:
    try:
        return lowered.compile()
    except Exception as error:  # the item decides what a failed program means
        return error


def use(programs: Programs, name: str) -> Any:
    """A compiled program, or its compilation's error raised."""
    if isinstance(programs[name], Exception):
        raise programs[name]
    return programs[name]


def device_answers() -> bool:
    """Whether the device still computes (an illegal address ends its context)."""
    try:
        return int(jax.jit(lambda x: x + 1)(jnp.int32(1))) == 2
    except Exception:
        return False


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-2000:]
