"""Faults that users of similar systems met (tests/data/field_reports.json): Flax's decode cache.

Each test bears the number of its report. The model is one that this project did not write, over
our cache (docs/integrations.md, which publishes the tolerances).
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import stranger_linen as zoo
from suites.stranger_runs import paged_logits

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.baselines import DenseEngine
from paged_jax.integrations.linen import as_model

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in (7, 1, 4, 9, 3, 5, 2, 6)]


@functools.cache
def stranger(dtype="float32"):
    module = zoo.GPT(dtype=jnp.dtype(dtype))
    params = zoo.weights(module)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return module, params, as_model(module.apply, params, max_position=zoo.MAX_LEN)


def make_engine(dtype="float32", **config):
    settings = {"block_size": 4, "num_blocks": 60, **config}
    return Engine(stranger(dtype)[2], config=EngineConfig(**settings))


def tokens_of(engine, prompts=PROMPTS):
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


def test_b61_seven_tokens_at_once_are_seven_steps():
    module, params, model = stranger()
    at_once = paged_logits(model, PROMPTS[0], [7])
    np.testing.assert_allclose(at_once, paged_logits(model, PROMPTS[0], [1] * 7), atol=1e-5)
    np.testing.assert_allclose(at_once, zoo.whole(module, params, PROMPTS[0]), atol=1e-5)
    cached = module.clone(decode=True)
    row, positions = jnp.asarray([PROMPTS[0]]), jnp.arange(7)[None]
    cache = cached.init(jax.random.key(0), row, positions)["cache"]
    with pytest.raises(ValueError, match="Autoregressive cache shape error"):
        cached.apply({**params, "cache": cache}, row, positions, mutable="cache")


def test_b63_64_bit_mode_and_strict_promotion_change_nothing():
    wanted = tokens_of(make_engine(), PROMPTS[:2])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        engine = make_engine()
        assert tokens_of(engine, PROMPTS[:2]) == wanted
    assert engine.executor.pool.blocks.dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "pool"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_b64_the_pool_keeps_its_dtype_and_its_buffer(dtype, pool):
    """Warnings are errors, one about a donated buffer that could not be used too."""
    engine = make_engine(dtype, kv_dtype=pool)
    engine.add_requests(PROMPTS[:3], GREEDY)
    address = engine.executor.pool.blocks.unsafe_buffer_pointer()
    while engine.has_unfinished:
        engine.step()
        blocks = engine.executor.pool.blocks
        assert blocks.dtype == pool
        assert blocks.unsafe_buffer_pointer() == address
    assert engine.stats.num_output_tokens == 24


def published_limits():
    """The numbers of the page's table: float32, bfloat16."""
    row = re.search(r"^\| paged against .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    return [float(number) for number in re.findall(r"within ([\d.e-]+)", row[0])]


def test_b66_float32_says_the_same_tokens_however_it_is_run():
    module, params, model = stranger()
    together = tokens_of(make_engine(max_num_seqs=8))
    assert together == tokens_of(make_engine(max_num_seqs=1))
    assert together == tokens_of(DenseEngine(model, max_num_seqs=8, max_model_len=32))
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        logits = zoo.whole(module, params, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b66_logits_stay_within_what_the_page_says(dtype):
    limit = published_limits()[("float32", "bfloat16").index(dtype)]
    module, params, model = stranger(dtype)
    tokens = np.random.default_rng(66).integers(0, 40, 24).tolist()
    in_chunks = paged_logits(model, tokens, [8, 8, *[1] * 8], dtype=jnp.dtype(dtype))
    whole, decoded = zoo.whole(module, params, tokens), zoo.decode(module, params, tokens)
    assert max(np.abs(in_chunks - dense).max() for dense in (whole, decoded)) < limit
    # Rounding, and no fault: as far from the same weights in float32 as the module's own way is.
    exact = zoo.whole(module.clone(dtype=jnp.float32), params, tokens)
    assert np.abs(in_chunks - exact).max() < max(1.5 * np.abs(whole - exact).max(), 1e-4)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_b66_a_row_among_eight_is_a_row_alone(dtype):
    limit = published_limits()[("float32", "bfloat16").index(dtype)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    gaps = []
    engines = [make_engine(dtype, kv_dtype=dtype, max_num_seqs=n) for n in (8, 1)]
    for one, other in zip(*(engine.generate(PROMPTS, params) for engine in engines), strict=True):
        a, b = (dict(output.logprobs[0].top) for output in (one, other))
        gaps += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    assert len(gaps) >= 8 * 3
    assert max(gaps) < limit
