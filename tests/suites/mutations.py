"""Bugs put into the Mosaic decode kernel, one at a time, and what of the tests sees each.

Run as a program with a bug's name, it prints what saw it: `race` (the interpreter's race
detector), `barrier` (its checks of barriers), `bounds` (of indices), `numbers` (a wrong answer or
NaN), `nothing`, or `error: ...`. `seen_by` runs that in a process of its own, because a bug may
be seen as a `deadlock` only.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

PACKAGE = "pallas_kernels.paged_attention"
KERNEL, MERGE = "mosaic_decode_kernel", "mosaic_merge"
SECONDS = 90  # the sound kernel takes under 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """A change of one module's text, and what is expected to see it."""

    old: str
    new: str = ""
    seen_by: str
    module: str = KERNEL
    mma: bool = False


BUGS = {
    "sound": Bug(old="", seen_by="nothing"),
    "no wait for a tile": Bug(
        old="            plgpu.barrier_wait(scratch.full.at[slot])\n", seen_by="race"
    ),
    "no wait for a free slot": Bug(
        old="            pl.when(issued >= stages)"
        "(lambda: plgpu.barrier_wait(scratch.free.at[slot]))\n",
        seen_by="race",
    ),
    "slot released before its last use": Bug(
        old="            sums = _accumulate(sums, scores, tile, slot, item, scratch, static)\n"
        "            plgpu.barrier_arrive(scratch.free.at[slot])\n",
        new="            plgpu.barrier_arrive(scratch.free.at[slot])\n"
        "            sums = _accumulate(sums, scores, tile, slot, item, scratch, static)\n",
        seen_by="race",
    ),
    "slot never released": Bug(
        old="            plgpu.barrier_arrive(scratch.free.at[slot])\n", seen_by="deadlock"
    ),
    "one arrival too few": Bug(
        old="num_arrivals=copies *", new="num_arrivals=copies - 1 *", seen_by="barrier"
    ),
    "one arrival too many": Bug(
        old="num_arrivals=copies *", new="num_arrivals=copies + 1 *", seen_by="deadlock"
    ),
    "wrong slot": Bug(
        old="lax.rem(taken + tile - item.lo, static.config.stages)",
        new="lax.rem(tile - item.lo, static.config.stages)",
        seen_by="deadlock",
    ),
    "no wait for the queries": Bug(
        old="        plgpu.barrier_wait(scratch.q_full.at[buffer])\n", seen_by="race"
    ),
    "no wait for a free query buffer": Bug(
        old="        pl.when(index - begin >= 2)"
        "(lambda: plgpu.barrier_wait(scratch.q_free.at[buffer]))\n",
        seen_by="race",
    ),
    "query buffer never released": Bug(
        old="        plgpu.barrier_arrive(scratch.q_free.at[buffer])\n", seen_by="deadlock"
    ),
    "no commit of p before the tensor core reads it": Bug(
        old="    store_transposed(scratch.p, p.astype(static.dtype))\n    plgpu.commit_smem()\n",
        new="    store_transposed(scratch.p, p.astype(static.dtype))\n",
        seen_by="nothing",
    ),
    "no commit before the output's copy": Bug(
        module=MERGE, old="        plgpu.commit_smem()\n", seen_by="race"
    ),
    "unreadable V not zeroed": Bug(
        old="    _zero_unreadable(v_ref, tile, item, static)\n", seen_by="numbers"
    ),
    "one key too many": Bug(
        old="seen = ahead <= bound", new="seen = ahead <= bound + 1", seen_by="numbers"
    ),
    "window one key too wide": Bug(
        old="ahead > bound - item.window", new="ahead >= bound - item.window", seen_by="numbers"
    ),
    "columns of a token taken for the next": Bug(
        old="ahead -= divided(", new="ahead += divided(", seen_by="numbers"
    ),
    "blocks of a tile in the wrong order": Bug(
        old="tile * count + j for", new="tile * count + count - 1 - j for", seen_by="numbers"
    ),
    "another head's rows": Bug(
        old="start = item.group *", new="start = (1 - item.group) *", seen_by="numbers"
    ),
    "old sums not decayed": Bug(
        old="        values * by_column(decay, values),\n",
        new="        values,\n",
        seen_by="numbers",
    ),
    "wrong weight of a partial result": Bug(
        module=MERGE,
        old="jnp.exp2(top - new_top)",
        new="jnp.exp2(new_top - new_top)",
        seen_by="numbers",
    ),
    "last item merged twice": Bug(
        module=MERGE, old="jnp.where(index < end, 1.0, 0.0)", new="1.0", seen_by="numbers"
    ),
    "no fence between threads' reads and the next copy": Bug(
        old="    if static.config.mma:  # threads",
        new="    if False:  # threads",
        seen_by="race",
        mma=True,
    ),
    # No valid table has such ids: the clamp is for the tables of compiled steps, never checked.
    "ids of blocks not clamped": Bug(
        old="[jnp.clip(block, 0, static.N - 1) for block in ids]", new="ids", seen_by="nothing"
    ),
    # An entry beyond the table; inside it, poisoned entries would be clamped, and masked.
    "unused entries of the table read": Bug(
        old="[jnp.minimum(column, last) for column in columns]", new="columns", seen_by="bounds"
    ),
}


def mutated_decode(bug: Bug) -> Callable:
    """`paged_attention_mosaic_decode` over the changed module."""
    name = f"mutated_{bug.module}"
    _load(name, changed_source(bug))
    api = _source("mosaic_decode").replace(f"{PACKAGE}.{bug.module} ", f"{name} ")
    assert f"from {name} import" in api
    return _load("mutated_mosaic_decode", api).paged_attention_mosaic_decode


def changed_source(bug: Bug) -> str:
    """The module's text with the bug; what it changes must be there exactly once."""
    source = _source(bug.module)
    if not bug.old:
        return source
    assert source.count(bug.old) == 1, f"{bug.old!r} is there {source.count(bug.old)} times"
    return source.replace(bug.old, bug.new)


def _source(module: str) -> str:
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).read_text()


def _load(name: str, source: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def seen_by(name: str) -> str:
    """What sees a bug, found in a process of its own."""
    root = pathlib.Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    environment = dict(os.environ, PYTHONPATH=path, JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", "suites.mutations", name]
    try:
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "deadlock"
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def observe(name: str) -> str:
    """What sees a bug, unless it is a deadlock."""
    import jax
    from suites import attention_cases

    from pallas_kernels.paged_attention.mosaic_config import MosaicDecodeConfig

    case = attention_cases.Case(
        dtype="bfloat16",
        block_size=16,
        num_kv_heads=2,
        group=2,
        head_dim=64,
        max_new=2,
        kv_lens=(37, 200, 130),
        window=100,
    )
    config = MosaicDecodeConfig(pack=1, stages=2, num_ctas=2, mma=BUGS[name].mma)
    decode = mutated_decode(BUGS[name])

    def run(*args, return_lse, score_fn, scale, **kwargs):
        options = dict(kwargs, scale=0.125, config=config, interpret=True)
        return jax.jit(functools.partial(decode, **options))(*args)

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):  # JAX 0.11 prints races
            attention_cases.check(run, case)
    except AssertionError:
        return "race" if "RACE DETECTED" in printed.getvalue() else "numbers"
    except Exception as error:
        if "RACE DETECTED" in str(error) + printed.getvalue():
            return "race"
        reason = str(error).strip().splitlines()[-1]
        if "IndexError: Out-of-bounds read" in reason:
            return "bounds"
        return "barrier" if "barrier" in reason.lower() else f"error: {reason}"
    return "race" if "RACE DETECTED" in printed.getvalue() else "nothing"


if __name__ == "__main__":
    print(observe(sys.argv[1]), flush=True)
    os._exit(0)  # threads of a failed run may still wait
