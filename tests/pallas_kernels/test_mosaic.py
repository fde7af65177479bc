"""Which Mosaic kernel takes a call, and what a step plans for it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.devices import A100, B200, H100
from pallas_kernels.paged_attention import mosaic, paged_attention, plan_attention
from pallas_kernels.paged_attention.call import AttentionCall

CALL = AttentionCall(
    num_rows=4,
    num_new=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    table_width=64,
    num_blocks=512,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)


def on(device):
    abstract = AbstractDevice(device_kind=device.kind, num_cores=device.num_sms, platform="cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract))


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({}, H100, None),
        ({"num_new": 512}, H100, None),
        ({"num_heads": 512, "num_new": 8}, H100, None),  # too many columns: prefill takes it
        ({}, B200, None),
        ({"num_new": 512}, B200, "prefill needs compute capability 9.x"),
        ({}, A100, "compute capability 9.0 or later"),
        ({"head_dim": 80}, H100, "head_dim 80"),
        ({"kv_dtype": "float32"}, H100, "float32"),
        ({"has_score_fn": True}, H100, "score_fn"),
    ],
)
def test_what_is_taken(change, device, reason):
    got = mosaic.unsupported(dataclasses.replace(CALL, **change), device)
    if reason is None:
        assert got is None
    else:
        assert got is not None
        assert reason in got


def arguments(num_new=1, dtype=jnp.bfloat16):
    shape = jax.ShapeDtypeStruct
    return (
        shape((4, num_new, 32, 128), dtype),
        shape((512, 2, 8, 16, 128), dtype),
        shape((4, 64), jnp.int32),
        shape((4,), jnp.int32),
        shape((4,), jnp.int32),
    )


def lower(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_new", [1, 64])
def test_lowers_through_the_op(num_new):
    def attend(*args):
        return paged_attention(*args, backend="mosaic")

    with on(H100):
        text = lower(attend, *arguments(num_new))
    assert "mosaic_gpu" in text


def test_layers_share_one_plan():
    """The list is made once; two layers that bring it make none of their own."""

    def layers(q, kv_blocks, tables, kv_lens, q_lens, *, share):
        work = None
        if share:
            work = plan_attention(
                kv_blocks, kv_lens, q_lens, num_heads=32, num_new=1, table_width=64
            )
            assert work is not None
        for _ in range(2):
            q = paged_attention(q, kv_blocks, tables, kv_lens, q_lens, work=work)
        return q

    with on(H100):
        shared, own = (
            lower(lambda *args, share=share: layers(*args, share=share), *arguments()).count("sort")
            for share in (True, False)
        )
    assert 0 < shared < own


def is_planned(*, num_new=1, dtype=jnp.bfloat16, backend=None):
    def plan(kv_blocks, kv_lens, q_lens):
        options = {"num_heads": 32, "num_new": num_new, "table_width": 64}
        return plan_attention(kv_blocks, kv_lens, q_lens, backend=backend, **options)

    _, kv_blocks, _, kv_lens, q_lens = arguments(dtype=dtype)
    return jax.eval_shape(plan, kv_blocks, kv_lens, q_lens) is not None


def test_no_plan_where_another_kernel_runs():
    assert not is_planned()  # a CPU
    with on(H100):
        assert is_planned()
        assert not is_planned(backend="xla")
        assert not is_planned(dtype=jnp.float32)
        assert not is_planned(num_new=64)
    with on(A100):
        assert not is_planned()


def test_a_plan_is_no_burden_to_other_backends():
    def attend(q, kv_blocks, tables, kv_lens, q_lens):
        work = plan_attention(kv_blocks, kv_lens, q_lens, num_heads=32, num_new=1, table_width=64)
        assert work is not None
        args = (q, kv_blocks, tables, kv_lens, q_lens)
        return paged_attention(*args, work=work, backend="xla")

    with on(H100):
        assert "mosaic_gpu" not in lower(attend, *arguments())
