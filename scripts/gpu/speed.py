"""Decode attention at the benchmark's shapes, beside a device copy and other libraries.

How it is timed: one program makes many calls in a loop, each with the last one's output added to
its queries, so that calls neither overlap nor leave the loop and launches are spread over the run
(about `TARGET_SECONDS`, one synchronisation). Consecutive calls read other rows of the pool, up to
`MAX_SETS` sets; where all sets together are less than twice the L2 cache, the result says so.
Lengths are constants of the program, so the mosaic backend's work list, which a step makes once
for all its layers, is not in these times; it is in those of the whole step. A round runs each
contender and the copy once, one after the other; medians of the rounds are given.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.devices import Device, current_device
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES, HeadShape
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.roofline import Cost, attention_cost

from .big_pool import free_bytes
from .contenders import CONTENDERS, TORCH_CONTENDERS, Data, NotHereError, chain
from .worker import Context, Item, LostDeviceError, Prepared, Programs, device_answers, lower, use

MODELS = ("llama3-8b", "llama3-70b/8", "smollm2", "gemma3-4b")
# (batch, context), the most telling first; four at a time are measured of every model.
LOADS = (
    (32, 2048), (8, 8192), (128, 2048), (1, 8192),
    (32, 8192), (1, 32768), (8, 2048), (128, 512),
    (8, 32768), (1, 2048), (32, 512), (128, 8192),
    (32, 32768), (8, 512), (1, 512), (128, 32768),
)  # fmt: skip
TARGET_SECONDS = 0.01
MAX_CALLS, MAX_SETS, ROUNDS = 256, 8, 5
COPY_BYTES = 2**29
ERROR_LIMIT = 2e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One measured shape; every row has `context` tokens."""

    heads: HeadShape
    batch: int
    context: int
    block_size: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As items are called."""
        return f"{self.heads.name} S{self.block_size} B{self.batch} context {self.context}"

    def call(self, num_sets: int = 1) -> AttentionCall:
        """The call that is timed, over a pool of several sets of rows."""
        width = -(-self.context // self.block_size)
        return AttentionCall(
            num_rows=self.batch,
            num_new=1,
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.heads.head_dim,
            block_size=self.block_size,
            table_width=width,
            num_blocks=num_sets * self.batch * width + 1,
            q_dtype=self.dtype,
            kv_dtype=self.dtype,
        )

    @property
    def cost(self) -> Cost:
        """Bytes and operations of one call."""
        return attention_cost(self.call(), [self.context] * self.batch)


def speed_items(context: Context) -> list[Item]:
    """All shapes, those first that tell most."""
    return [
        Item(
            item_id=f"decode/{shape.name}",
            section="speed",
            prepare=functools.partial(_prepare, context, shape),
        )
        for shape in shapes(rehearsal=context.rehearsal)
    ]


def shapes(*, rehearsal: bool) -> list[Shape]:
    """Every load of every model at both block sizes."""
    if rehearsal:
        heads = HeadShape(name="rehearsal", num_heads=2, num_kv_heads=1, head_dim=64)
        return [Shape(heads=heads, batch=1, context=32, block_size=16)]
    return [
        Shape(heads=HEAD_SHAPES[model], batch=batch, context=tokens, block_size=block_size)
        for first in range(0, len(LOADS), 4)
        for block_size in (16, 64)
        for model in MODELS
        for batch, tokens in LOADS[first : first + 4]
    ]


def call_cost(call: AttentionCall) -> Cost:
    """Bytes and operations of a decode call whose tables are full."""
    return attention_cost(call, [call.table_width * call.block_size] * call.num_rows)


def num_sets(call: AttentionCall, device: Device) -> int:
    """Sets of rows that calls take in turns, to have more keys and values than L2 holds."""
    return int(np.clip(-(-2 * device.l2_bytes // call_cost(call).kv_bytes), 1, MAX_SETS))


def num_turns(call: AttentionCall, device: Device, sets: int) -> int:
    """Turns of the loop, of `sets` calls each, that take about `TARGET_SECONDS`."""
    call_seconds = max(2 * call_cost(call).floor_seconds(device), TARGET_SECONDS / MAX_CALLS)
    return max(1, round(TARGET_SECONDS / call_seconds / sets))


def _prepare(context: Context, shape: Shape) -> Prepared:
    device = current_device()
    sets = 2 if context.rehearsal else num_sets(shape.call(), device)
    turns = 1 if context.rehearsal else num_turns(shape.call(), device, sets)
    spec = Data.spec(shape.call(sets), sets)
    lowered, skipped = {}, {}
    for name, contender in CONTENDERS.items():
        is_ours = name in ("mosaic", "triton", "xla")
        if name in context.excluded or (is_ours and name not in context.backends):
            skipped[name] = "excluded"
            continue
        try:
            attend = contender.attend(spec, context.rehearsal)
            program = chain(attend, turns=turns, sets=sets, own_layout=contender.own_layout)
            lowered[name] = lower(program, spec.q, contender.view(spec))
        except Exception as error:  # another library's refusal is its result
            skipped[name] = f"{type(error).__name__}: {error}"[:300]
    copy_elements = 2**12 if context.rehearsal else COPY_BYTES // 4
    copy_turns = 1 if context.rehearsal else 8
    buffer = jax.ShapeDtypeStruct((copy_elements,), jnp.int32)
    lowered["copy"] = lower(jax.jit(functools.partial(_copy, turns=copy_turns)), buffer)
    lowered["read"] = lower(jax.jit(functools.partial(_read, turns=copy_turns)), buffer)

    def run(programs: Programs) -> dict[str, Any]:
        for name in [n for n, p in programs.items() if isinstance(p, Exception)]:
            skipped[name] = f"{type(programs[name]).__name__}: {programs[name]}"[:300]
        runner = _Runner(context=context, shape=shape, sets=sets, turns=turns, skipped=skipped)
        moved = {"copy": 8 * copy_elements * copy_turns, "read": 4 * copy_elements * copy_turns}
        return runner.run(programs, spec, copy_elements, moved)

    return Prepared(programs=lowered, run=run)


def _copy(x: jax.Array, *, turns: int) -> jax.Array:
    return jax.lax.fori_loop(0, turns, lambda i, x: x + 1, x)


def _read(x: jax.Array, *, turns: int) -> jax.Array:
    def body(i: Any, carry: Any) -> Any:
        x, total = carry
        x, total = jax.lax.optimization_barrier((x, total))
        return x, total + x.max()

    return jax.lax.fori_loop(0, turns, body, (x, jnp.int32(0)))[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Runner:
    """Runs the contenders of a shape in turns."""

    context: Context
    shape: Shape
    sets: int
    turns: int
    skipped: dict[str, str]

    def run(self, programs: Programs, spec: Data, copy_elements: int, moved: dict[str, int]) -> Any:
        pool_bytes = self.shape.cost.kv_block_bytes * self.sets
        room = free_bytes() * 0.9
        if pool_bytes * 1.1 > room:
            return {"status": "skipped", "reason": f"a pool of {pool_bytes} bytes does not fit"}
        data = spec.make()
        forms: dict[str, Callable[[], Any]] = {}
        views: dict[str, Any] = {}
        for name, contender in CONTENDERS.items():
            if name in self.skipped or name not in programs:
                continue
            others = {layout for layout in views if layout != "pool"} | {contender.layout}
            need = pool_bytes * (1 + len(others) + contender.own_layout)
            if contender.layout != "pool" and need > room:
                self.skipped[name] = f"its own copy of {pool_bytes} bytes does not fit"
                continue
            if contender.layout not in views:
                views[contender.layout] = contender.view(data)
            program, view = use(programs, name), views[contender.layout]
            if contender.own_layout:
                view = jax.device_put(view, program.input_formats[0][1])
            forms[name] = functools.partial(_finish, program, data.q, view)
        for name, make in TORCH_CONTENDERS.items():
            try:
                if self.context.rehearsal or name in self.context.excluded:
                    raise NotHereError("not in a rehearsal, or excluded")
                self.context.phase(f"decode/{self.shape.name}", name)
                forms[name] = make(data, views, self.turns)
            except Exception as error:
                self.skipped[name] = f"{type(error).__name__}: {error}"[:300]
        buffer = jnp.zeros(copy_elements, jnp.int32)
        for name in moved:
            forms[name] = functools.partial(_finish, use(programs, name), buffer)
        seconds, outputs = self._rounds(forms)
        return self._fields(seconds, outputs, moved)

    def _rounds(self, forms: dict[str, Any]) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Seconds of every run, and each contender's last output."""
        outputs, seconds = {}, {}
        for name in list(forms):  # the first run, not timed
            self.context.phase(f"decode/{self.shape.name}", name)
            try:
                outputs[name] = forms[name]()
            except Exception as error:
                if not device_answers():
                    raise LostDeviceError(f"decode/{self.shape.name}: {name}: {error}") from error
                self.skipped[name] = f"{type(error).__name__}: {error}"[:300]
                del forms[name]
        for _ in range(1 if self.context.rehearsal else ROUNDS):
            for name, form in forms.items():
                start = time.perf_counter()
                form()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
        return seconds, outputs

    def _fields(self, seconds: Any, outputs: dict[str, Any], moved: dict[str, int]) -> Any:
        cost, calls = self.shape.cost, self.sets * self.turns
        speeds = {n: b / statistics.median(seconds.pop(n)) for n, b in moved.items()}
        wanted = outputs.get("xla", next(iter(outputs.values())))
        measured, wrong = {}, []
        for name, values in seconds.items():
            times = sorted(value / calls for value in values)
            median = statistics.median(times)
            measured[name] = {
                "seconds": median,
                "least": times[0],
                "most": times[-1],
                "bytes_per_s": cost.least_bytes / median,
                "share_of_copy": cost.least_bytes / median / speeds["copy"],
            }
            if name == "empty":
                continue
            difference = np.abs(
                np.asarray(outputs[name], np.float32) - np.asarray(wanted, np.float32)
            )
            error = float(difference.max())
            measured[name]["difference"] = error if np.isfinite(error) else "not finite"
            if not error <= ERROR_LIMIT:
                wrong.append(f"{name} differs by {error}")
        shares = {n: f"{m['share_of_copy']:.0%}" for n, m in measured.items() if n != "empty"}
        return {
            "status": "fail" if wrong else "measured",
            "reason": "; ".join(wrong),
            "note": "share of a copy: " + ", ".join(f"{n} {x}" for n, x in shares.items()),
            "contenders": measured,
            "skipped": self.skipped,
            "copy_bytes_per_s": speeds["copy"],
            "read_bytes_per_s": speeds["read"],
            "least_bytes": cost.least_bytes,
            "floor_seconds": cost.floor_seconds(current_device()),
            "calls": calls,
            "sets": self.sets,
            "in_l2": self.sets * cost.kv_bytes < 2 * current_device().l2_bytes,
        }


def _finish(program: Any, *args: Any) -> jax.Array:
    return jax.block_until_ready(program(*args))
