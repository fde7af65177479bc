"""The work list: every tile exactly once, runs that differ by at most one tile."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.devices import B200, H100
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.work import Work, plan_decode_work, plan_work

ROWS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3)), min_size=6, max_size=6)
GEOMETRIES = ((1, 16, 5), (3, 64, 1), (2, 64, 40))  # head groups, tokens a tile, thread blocks

plan_compiled = jax.jit(plan_work, static_argnames=("num_groups", "tile_tokens", "num_ctas"))


def check(
    work: Work, kv_lens: np.ndarray, q_lens: np.ndarray, *, window: int | None = None
) -> None:
    """Assert that the list covers each tile of each unit once, in order, and evenly."""
    items, cta_ptr, unit_ptr = (np.asarray(x) for x in (work.items, work.cta_ptr, work.unit_ptr))
    lengths = items[:, 3] - items[:, 2]
    assert lengths.min() >= 0
    assert cta_ptr[0] == 0
    assert cta_ptr[-1] == len(items)
    assert (np.diff(cta_ptr) >= 0).all()
    loads = [lengths[a:b].sum() for a, b in itertools.pairwise(cta_ptr)]
    assert max(loads) - min(loads) <= 1
    for unit in range(len(kv_lens) * work.num_groups):
        row, group = divmod(unit, work.num_groups)
        length = int(kv_lens[row]) if q_lens[row] else 0
        first = 0 if window is None else max(0, length - int(q_lens[row]) - window + 1)
        own = items[unit_ptr[unit] : unit_ptr[unit + 1]]
        assert (own[:, 0] == row).all()
        assert (own[:, 1] == group).all()
        tiles = [tile for _, _, lo, hi in own for tile in range(lo, hi)]
        tokens = work.tile_tokens
        assert tiles == list(range(first // tokens, -(-length // tokens)))
    inside = np.zeros(len(items), bool)
    for a, b in itertools.pairwise(unit_ptr):
        inside[a:b] = True
    assert lengths[~inside].sum() == 0


@settings(max_examples=100, deadline=None)
@given(
    rows=ROWS,
    geometry=st.sampled_from(GEOMETRIES),
    window=st.sampled_from([None, 1, 50]),
)
def test_each_tile_once_and_evenly(rows, geometry, window):
    num_groups, tile_tokens, num_ctas = geometry
    kv_lens, q_lens = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    q_lens = np.minimum(q_lens, kv_lens)
    work = plan_compiled(
        kv_lens,
        q_lens,
        num_groups=num_groups,
        tile_tokens=tile_tokens,
        num_ctas=num_ctas,
        window=window,
    )
    check(work, kv_lens, q_lens, window=window)


def test_no_tiles_at_all():
    zeros = jnp.zeros(4, jnp.int32)
    work = plan_compiled(zeros, zeros, num_groups=2, tile_tokens=64, num_ctas=3)
    check(work, np.zeros(4), np.zeros(4))
    assert work.num_ctas == 3


def test_a_step_plans_once_for_all_layers():
    """The list is a pytree: made in a compiled step, with a traced window, and passed on."""
    kv_lens, q_lens = np.array([1000, 3, 0], np.int32), np.array([1, 1, 0], np.int32)
    work = plan_compiled(
        kv_lens, q_lens, num_groups=2, tile_tokens=64, num_ctas=7, window=jnp.int32(100)
    )
    assert work.has_window
    check(work, kv_lens, q_lens, window=100)


@pytest.mark.parametrize(("device", "num_ctas"), [(H100, 264), (B200, 296)])
def test_the_kernel_s_own_geometry(device, num_ctas):
    lens = jnp.full(3, 100, jnp.int32)
    call = AttentionCall(
        num_rows=3,
        num_new=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        table_width=7,
        num_blocks=100,
        q_dtype="float32",
        kv_dtype="bfloat16",
    )
    work = plan_decode_work(call, lens, jnp.ones(3, jnp.int32), device=device)
    assert (work.num_groups, work.tile_tokens, work.num_ctas) == (4, 32, num_ctas)
    check(work, np.full(3, 100), np.ones(3))
