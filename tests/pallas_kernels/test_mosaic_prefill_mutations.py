"""Bugs injected into the Mosaic prefill kernel, and what sees each: a check of the other tests.

Not seen by the interpreter, which reads V by plain loads: zeros of V that are not committed
before the product.
"""

import dataclasses
import re
import subprocess
import sys
import textwrap

import pytest

from pallas_kernels.paged_attention import mosaic_prefill_kernel, mosaic_prefill_tile

RUNNER = textwrap.dedent(
    """
    import functools, importlib.util, sys
    sys.path.insert(0, "tests")
    name, old, new = sys.argv[1:]
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    source = spec.loader.get_source(name)
    assert source.count(old) == 1, source.count(old)
    sys.modules[name] = module
    exec(compile(source.replace(old, new), spec.origin, "exec"), module.__dict__)

    from pallas_kernels.paged_attention.mosaic_prefill import paged_attention_mosaic_prefill
    from pallas_kernels.paged_attention.mosaic_prefill_config import MosaicPrefillConfig
    from suites.attention_cases import Case, check

    def op(*args, return_lse, score_fn, scale, **kwargs):
        config = MosaicPrefillConfig(tile_rows=128, tile_tokens=64, num_stages=2)
        return paged_attention_mosaic_prefill(
            *args, scale=0.125, config=config, interpret=True, **kwargs
        )

    check(op, Case(
        dtype="bfloat16", block_size=16, num_kv_heads=1, group=4, head_dim=64, max_new=20,
        kv_lens=(390, 83), q_lens=(20, 17), window=290,
    ))
    """
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """Replace `old`, which occurs once, by `new`; the run then prints what `seen_as` matches."""

    name: str
    old: str
    new: str = ""
    seen_as: str
    in_tile: bool = False


HAZARD = "RACE DETECTED|awaiting phase|completed phase"  # by what the threads do first
WRONG = "Not equal to tolerance"
HANGS = "hangs"
MUTATIONS = [
    Mutation(
        name="no wait for K",
        old="        plgpu.barrier_wait(refs.k_full.at[slot])\n",
        seen_as=HAZARD,
    ),
    Mutation(
        name="no wait for V",
        old="        plgpu.barrier_wait(refs.v_full.at[slot])\n",
        seen_as=HAZARD,
    ),
    Mutation(
        name="no wait for Q",
        old="        plgpu.barrier_wait(refs.q_full.at[w])\n",
        seen_as=HAZARD,
    ),
    Mutation(
        name="early refill",
        old="pl.when(i >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))",
        new="pass",
        seen_as=HAZARD,
    ),
    Mutation(
        name="K released before it is read",
        old="        s = scores(\n",
        new="        plgpu.barrier_arrive(refs.k_free.at[slot])\n        s = scores(\n",
        seen_as=HAZARD,
    ),
    Mutation(
        name="V never released",
        old="        plgpu.barrier_arrive(refs.v_free.at[slot])\n",
        seen_as=HANGS,
    ),
    Mutation(
        name="too few arrivals expected of copies",
        old="num_arrivals=st.copies_per_tile",
        new="num_arrivals=st.copies_per_tile - 1",
        seen_as=HAZARD,
    ),
    Mutation(
        name="one consumer's release is enough",
        old="free = plgpu.Barrier(num_arrivals=consumers",
        new="free = plgpu.Barrier(num_arrivals=1",
        seen_as=HAZARD,
    ),
    Mutation(
        name="no wait for the other's zeros",
        old="    plgpu.barrier_wait(refs.zeroed)\n",
        seen_as=HAZARD,
    ),
    Mutation(
        name="output copied before it is committed",
        old="    plgpu.commit_smem()\n    plgpu.copy_smem_to_gmem(refs.q_tile",
        new="    plgpu.copy_smem_to_gmem(refs.q_tile",
        seen_as=HAZARD,
    ),
    Mutation(
        name="a query sees the next position",
        old="distance >= 0",
        new="distance >= -1",
        seen_as=WRONG,
        in_tile=True,
    ),
    Mutation(
        name="a window one too long",
        old="distance < window",
        new="distance <= window",
        seen_as=WRONG,
        in_tile=True,
    ),
    Mutation(
        name="too few border tiles",
        old="tile_start + (tokens - 1) > mine.first_query",
        new="tile_start + (tokens - 1) > mine.last_query + 30",
        seen_as=WRONG,
    ),
    Mutation(
        name="a tile short of the window",
        old="    first = div(span.start, tokens)\n",
        new="    first = div(span.start + (tokens - 1), tokens)\n",
        seen_as=WRONG,
    ),
    Mutation(
        name="K and V exchanged",
        old="2 * block + x",
        new="2 * block + 1 - x",
        seen_as=WRONG,
    ),
    Mutation(
        name="the table's next entry",
        old="jnp.clip(div(position, S), first_entry",
        new="jnp.clip(div(position, S) + 1, first_entry",
        seen_as=WRONG,
    ),
    Mutation(
        name="entries that are not in use",
        old="jnp.clip(div(position, S), first_entry, last_entry)",
        new="div(position, S)",
        seen_as="Out-of-bounds read",
    ),
    Mutation(
        name="V not zeroed past the context",
        old="(position >= start) & (position < stop)",
        new="position >= start",
        seen_as=WRONG,
        in_tile=True,
    ),
    Mutation(
        name="V not zeroed before the window",
        old="(position >= start) & (position < stop)",
        new="position < stop",
        seen_as=WRONG,
        in_tile=True,
    ),
    Mutation(
        name="padding rows not hidden",
        old="jnp.where(is_padding, 0.0, total)",
        new="total",
        seen_as=WRONG,
    ),
    Mutation(
        name="old sums not rescaled",
        old="total * alpha + p.sum(axis=1)",
        new="total + p.sum(axis=1)",
        seen_as=WRONG,
    ),
]


def outcome(mutation: Mutation) -> str:
    module = mosaic_prefill_tile if mutation.in_tile else mosaic_prefill_kernel
    command = [sys.executable, "-c", RUNNER, module.__name__, mutation.old, mutation.new]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return HANGS
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_an_injected_bug_is_seen(mutation):
    assert re.search(mutation.seen_as, outcome(mutation))
