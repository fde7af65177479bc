"""JAX's GPU paged attention has tests of its own: the same kinds of cases, on our backends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.integrations.jax_pallas import paged_attention, pool_from_jax_pages

LENGTHS = (3, 0, 17, 64)


def draw(*, page_size=8, num_kv_heads=2, group=2, head_dim=32, dtype=np.float16, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    rows, width = len(lengths), -(-max(lengths) // page_size)
    pages = rng.normal(size=(2, num_kv_heads, rows * width, page_size, head_dim))
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    q = rng.normal(size=(rows, num_kv_heads * group, head_dim)) * head_dim**-0.5
    k_pages, v_pages = pages.astype(dtype)
    return q.astype(dtype), k_pages, v_pages, tables, np.int32(lengths)


def answer(q, k_pages, v_pages, tables, lengths, cap=None):
    """Plain softmax in float64; scores are not scaled, as in JAX's op."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    out = np.zeros(q.shape)
    group = q.shape[1] // k_pages.shape[0]
    for b, h in np.ndindex(q.shape[:2]):
        if lengths[b] == 0:
            continue
        k, v = (
            pages[h // group, tables[b]].reshape(-1, q.shape[2])[: lengths[b]]
            for pages in (k_pages, v_pages)
        )
        score = k @ q[b, h]
        if cap is not None:
            score = cap * np.tanh(score / cap)
        weight = np.exp(score - score.max())
        out[b, h] = weight @ v / weight.sum()
    return out


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 2), (2, 16), (1, 20)])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_equals_a_plain_softmax(page_size, num_kv_heads, group, cap):
    args = draw(page_size=page_size, num_kv_heads=num_kv_heads, group=group)
    out = paged_attention(*args, attn_logits_soft_cap=cap, block_h=16, k_splits=4)
    assert out.dtype == np.float16
    np.testing.assert_allclose(np.float64(out), answer(*args, cap), atol=3e-3)


def quantize(pages, dtype):
    top = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = np.abs(np.float32(pages)).max(axis=-1) / top
    return jnp.asarray(np.float32(pages) / scales[..., None]).astype(dtype), scales


@pytest.mark.parametrize("which", ["k", "v", "kv"])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
def test_quantized_pages(which, dtype):
    q, k_pages, v_pages, tables, lengths = draw()
    want = answer(q, k_pages, v_pages, tables, lengths)
    k_scales = v_scales = None
    if "k" in which:
        k_pages, k_scales = quantize(k_pages, dtype)
    if "v" in which:
        v_pages, v_scales = quantize(v_pages, dtype)
    out = np.float64(paged_attention(q, k_pages, v_pages, tables, lengths, k_scales, v_scales))
    error = np.linalg.norm(out - want, axis=-1) / np.linalg.norm(want)
    assert error.mean() < 0.1


def test_without_lengths_every_table_is_full():
    q, k_pages, v_pages, tables, _ = draw(lengths=(16, 16))
    out = paged_attention(q, k_pages, v_pages, tables, None)
    want = answer(q, k_pages, v_pages, tables, np.int32([16, 16]))
    np.testing.assert_allclose(np.float64(out), want, atol=3e-3)


def test_may_be_jitted():
    args = draw()
    np.testing.assert_array_equal(jax.jit(paged_attention)(*args), paged_attention(*args))


def test_page_i_becomes_block_i():
    _, k_pages, v_pages, _, _ = draw()
    pool = pool_from_jax_pages(k_pages, v_pages)
    np.testing.assert_array_equal(pool[3, 0, 1], k_pages[1, 3])
    np.testing.assert_array_equal(pool[5, 1, 0], v_pages[0, 5])


def test_refused():
    q, k_pages, v_pages, tables, lengths = draw()
    with pytest.raises(ValueError, match="unknown argument 'block_k'; must be one of"):
        paged_attention(q, k_pages, v_pages, tables, lengths, block_k=4)
    with pytest.raises(ValueError, match=r"q has shape .*; must be \[B, H, D\]"):
        paged_attention(q[0], k_pages, v_pages, tables, lengths)
    with pytest.raises(ValueError, match=r"k_pages is float16.* and v_pages is float16.*; must be"):
        paged_attention(q, k_pages, v_pages[:, :2], tables, lengths)
    with pytest.raises(ValueError, match="k_pages is float32"):
        pool_from_jax_pages(jnp.float32(k_pages), v_pages)
