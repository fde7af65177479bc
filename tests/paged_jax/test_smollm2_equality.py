"""Paged equals dense on the real weights, in float32 (docs/design.md, "Equality").

The 32 requests of the built-in workload, through the engine in many ways, against one static batch
over a dense cache. A request may part from it only after a step whose two best logits nearly tie,
and at most two requests may; each is printed.
"""

import numpy as np
import pytest

from paged_jax import Engine, EngineConfig, KVPool, SamplingParams, count_compilations
from paged_jax.baselines import run_static_batch
from paged_jax_scripts import workload

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("smollm2")]

NEAR_TIE = 2e-3
MAX_DIFFERENT = 2
MAX_COMPILATIONS = 12


def cut(requests, max_tokens):
    """The same requests with shorter outputs."""
    return [
        workload.Request(request.prompt_token_ids, min(request.max_tokens, max_tokens))
        for request in requests
    ]


def run_dense(model, requests):
    prompts = [request.prompt_token_ids for request in requests]
    return run_static_batch(model, prompts, [request.max_tokens for request in requests])


@pytest.fixture(scope="module")
def all_requests():
    return workload.load()


@pytest.fixture(scope="module")
def dense_of_all(smollm2, all_requests):
    return run_dense(smollm2, all_requests)


@pytest.fixture(scope="module")
def requests(all_requests):
    """A part that `make test` has time for; the long tests take all of them."""
    return cut([request for request in all_requests if len(request.prompt_token_ids) < 170][:8], 20)


@pytest.fixture(scope="module")
def dense(smollm2, requests):
    return run_dense(smollm2, requests)


def make_engine(model, **settings):
    engine = Engine(model, config=EngineConfig(debug_integrity=True, **settings))
    pool = engine.executor.pool
    # Slots that nobody wrote hold NaN: they must change nothing.
    engine.executor.pool = KVPool.create(
        model.spec, num_blocks=pool.num_blocks, block_size=pool.block_size, fill=np.nan
    )
    return engine


def run(engine, requests, order):
    """Generate in the given order; check the waste at every step; return tokens by number."""
    ids = {}
    for number in order:
        request = requests[number]
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        ids[engine.add_request(request.prompt_token_ids, params)] = number
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                tokens[ids[output.request_id]] = list(output.token_ids)
        stats = engine.block_manager.stats()
        assert stats.waste < max(engine.scheduler.num_running, 1) * engine.config.block_size
    assert engine.block_manager.stats().free == engine.num_blocks - 1
    return tokens


def assert_equal_but_for_near_ties(tokens, dense):
    different = 0
    for number, got in sorted(tokens.items()):
        expected = dense.token_ids[number]
        if got == expected:
            continue
        step = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        margin = dense.margins[number, step]
        print(f"request {number} parts at step {step}, top-two margin {margin:.2e}")
        assert margin < NEAR_TIE
        different += 1
    assert different <= MAX_DIFFERENT


# Every block size, chunk and pool once in each list.
SAMPLED = [
    {"block_size": 16},
    {"block_size": 8, "prefill_chunk_len": 16, "prefill_row_len": 16, "num_blocks": 50},
    {"block_size": 1, "prefill_chunk_len": 64, "num_blocks": 400},
    {"block_size": 8, "prefill_chunk_len": 16, "prefill_row_len": 16, "num_blocks": 50,
     "preemption": "swap"},
]  # fmt: skip
FULL = [
    {"block_size": 16},
    {"block_size": 16, "prefill_chunk_len": 16, "prefill_row_len": 16},
    {"block_size": 16, "prefill_chunk_len": 64, "num_blocks": 100},
    {"block_size": 1, "prefill_chunk_len": 64},
    {"block_size": 1, "num_blocks": 1600},
    {"block_size": 8, "prefill_chunk_len": 16, "prefill_row_len": 16, "num_blocks": 200},
    {"block_size": 8},
    {"block_size": 64, "prefill_chunk_len": 64, "num_blocks": 30},
    {"block_size": 64, "prefill_chunk_len": 16, "prefill_row_len": 16},
    {"block_size": 16, "num_blocks": 100, "preemption": "swap"},
]


def check(model, requests, dense, settings, order):
    engine = make_engine(model, **settings)
    assert_equal_but_for_near_ties(run(engine, requests, order), dense)
    if "num_blocks" in settings:
        assert engine.stats.num_preemptions > 0
    num_swapped = engine.stats.num_preemptions if settings.get("preemption") == "swap" else 0
    assert engine.stats.num_swap_preemptions == num_swapped
    print(f"{settings}: {engine.stats.num_preemptions} preemptions")


@pytest.mark.parametrize("settings", SAMPLED, ids=str)
def test_together(smollm2, requests, dense, settings):
    check(smollm2, requests, dense, settings, range(len(requests)))


def test_alone_and_reversed(smollm2, requests, dense):
    engine = make_engine(smollm2, block_size=64)
    tokens = {}
    for number in (5, 2):
        tokens |= run(engine, requests, [number])
    assert_equal_but_for_near_ties(tokens, dense)


@pytest.mark.parametrize("block_size", [1, pytest.param(16, marks=pytest.mark.long)])
def test_logits_at_the_same_shapes(smollm2, requests, block_size):
    compare_logits(smollm2, cut(requests, 8), block_size)


def compare_logits(model, requests, block_size):
    prompts = [request.prompt_token_ids for request in requests]
    counts = [request.max_tokens for request in requests]
    dense = run_static_batch(model, prompts, counts, keep_logits=True)
    paged = run_static_batch(
        model, prompts, counts, cache="paged", block_size=block_size, forced=dense.token_ids,
        keep_logits=True,
    )  # fmt: skip
    difference = 0.0
    for step, (one, other) in enumerate(zip(dense.logits, paged.logits, strict=True)):
        live = np.array(counts) > step  # rows that have ended are fed different tokens
        difference = max(difference, np.abs(one - other)[live].max())
    print(f"largest logit difference {difference:.2e}")
    assert difference < 1e-4


def test_a_prefix_hit_is_within_noise_of_the_cold_run(smollm2):
    """256 of about 300 prompt tokens are cached; log-probabilities stand for logits."""
    shared = workload.load_shared_prefix()
    prompts = [request.prompt_token_ids for request in shared.requests[:2]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    engine = make_engine(smollm2, num_blocks=90)
    handle = engine.register_prefix(shared.prefix_token_ids)
    hits = [engine.generate(prompt, params)[0] for prompt in prompts]
    engine.unregister_prefix(handle)
    engine.reset_prefix_cache()
    cold = [
        engine.generate(prompt, params, cache_salt=str(i))[0] for i, prompt in enumerate(prompts)
    ]
    assert [output.num_cached_tokens for output in hits] == [256, 256]
    assert [output.num_cached_tokens for output in cold] == [0, 0]
    for one, other in zip(hits, cold, strict=True):
        for hit, miss in zip(one.logprobs, other.logprobs, strict=True):
            (_, best), (_, second) = miss.top
            assert abs(hit.top[0][1] - best) < 1e-3
            if hit.token_id != miss.token_id:
                assert best - second < NEAR_TIE
                break


@pytest.mark.long
def test_compilations_of_the_32_requests(smollm2, all_requests):
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        for request in all_requests
    ]
    prompts = [request.prompt_token_ids for request in all_requests]
    with count_compilations() as first:
        engine = Engine(smollm2)
        engine.generate(prompts, params)
    print(f"{first.count} compilations, at most {engine.executor.max_plain_programs}")
    assert first.count <= engine.executor.max_plain_programs <= MAX_COMPILATIONS
    with count_compilations() as second:
        engine.generate(prompts, params)
    assert second.count == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", FULL, ids=str)
def test_all_together_in_any_order(smollm2, all_requests, dense_of_all, settings):
    order = np.random.default_rng(len(str(settings))).permutation(len(all_requests)).tolist()
    check(smollm2, all_requests, dense_of_all, settings, order)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_each_alone(smollm2, all_requests, dense_of_all):
    engine = make_engine(smollm2)
    tokens = {}
    for number in range(len(all_requests)):
        tokens |= run(engine, all_requests, [number])
    assert_equal_but_for_near_ties(tokens, dense_of_all)


@pytest.mark.long
def test_logits_of_all_32_requests(smollm2, all_requests):
    compare_logits(smollm2, cut(all_requests, 24), 16)
