"""With the integer-hash model every token is exactly that of the prompt alone: no exception.

One wrong, missing, foreign or stale slot anywhere would change all later tokens.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites import hash_model
from suites.engine_runs import (
    check_greedy,
    drive,
    fill_pool,
    garbage_pool,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)

# (row length, block size, tokens a step). The pool holds two of the longest requests; four run.
GEOMETRIES = [
    # Fewer rows a step are fewer programs; block size 64 is among those of test_field_reports.py.
    (1, 16, 4),
    (8, 1, 16),
    (32, 8, 64),
    *(
        pytest.param(*pair, 64, marks=pytest.mark.long)
        for pair in itertools.product([1, 8, 32], [1, 8, 16, 64])
    ),
]
MAX_MODEL_LEN = 120
CHUNKS = (16, 64, None)


def geometry_config(row_len: int, block_size: int, budget: int) -> dict[str, int]:
    return {
        "block_size": block_size,
        "num_blocks": 1 + 2 * -(-MAX_MODEL_LEN // block_size),
        "max_model_len": MAX_MODEL_LEN,
        "prefill_row_len": row_len,
        "max_num_batched_tokens": budget,
    }


def mix(seed: int) -> tuple[list[list[int]], list]:
    """Prompts around the edges of rows and blocks, then four whose outputs do not fit together."""
    rng = random.Random(seed)
    edges = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 99]
    lens = [*rng.choices(edges, k=6), 3, 9, 20, 30]
    params = [greedy(rng.choice([1, 2, 9, 20])) for _ in lens[:6]] + [greedy(85)] * 4
    return random_prompts(seed, lens), params


@pytest.mark.parametrize(("row_len", "block_size", "budget"), GEOMETRIES)
def test_any_mix_in_any_order_and_chunking_in_a_pool_of_nan(row_len, block_size, budget):
    config = geometry_config(row_len, block_size, budget)
    prompts, params = mix(block_size)
    for chunk_len in CHUNKS:
        engine = make_engine(prefill_chunk_len=chunk_len, **config)
        fill_pool(engine, np.nan)
        check_greedy(run_all(engine, prompts, params), params)
        # Garbage of the run before, other neighbours.
        check_greedy(run_all(engine, prompts[::-1], params[::-1]), params[::-1])
        assert engine.stats.num_preemptions > 0
        order = random.Random(row_len).sample(range(10), 10)
        shuffled = [params[i] for i in order]
        check_greedy(run_all(engine, [prompts[i] for i in order], shuffled), shuffled)
    alone = make_engine(**config)
    garbage_pool(alone, seed=1)
    for prompt, one in zip(prompts[:4], params[:4], strict=True):
        check_greedy(run_all(alone, [prompt], one), [one])


def test_preempted_again_and_again():
    """Four requests that each want the whole pool."""
    engine = make_engine()
    fill_pool(engine, np.nan)
    for seed in range(5):
        prompts = random_prompts(seed, [30, 4, 17, 9, 44, 1])
        params = [greedy(64 - len(prompt)) for prompt in prompts]
        outputs = run_all(engine, prompts, params)
        check_greedy(outputs, params)
        assert sum(output.num_preemptions for output in outputs) >= 3
        assert all(output.num_preemptions <= 3 for output in outputs)
    assert engine.stats.num_preemptions >= 20


def test_requests_that_arrive_while_others_run():
    engine = make_engine(prefill_chunk_len=5)
    prompts, arrivals = random_prompts(3, range(1, 25)), {}

    def add(index: int) -> bool:
        number, rest = divmod(index, 3)
        if rest == 0 and number < len(prompts):
            arrivals[engine.add_request(prompts[number], greedy(1 + number))] = number
        return number < len(prompts)

    outputs = drive(engine, before_step=add)
    assert len(outputs) == len(prompts)
    check_greedy(
        [outputs[request_id][-1] for request_id in arrivals],
        [greedy(1 + number) for number in arrivals.values()],
    )


def test_other_weights_give_other_tokens():
    """The test above could not fail if the model did not depend on what the engine feeds it."""
    engine = make_engine(hash_model.make_model(salt=5))
    (prompt,) = random_prompts(4, [12])
    (output,) = run_all(engine, [prompt], greedy(10))
    assert list(output.token_ids) == hash_model.expected_greedy(prompt, 10, salt=5)
    assert list(output.token_ids) != hash_model.expected_greedy(prompt, 10)


@pytest.mark.parametrize("infinite", [np.inf, -np.inf, 1e38, np.nan])
def test_what_unused_slots_hold_changes_nothing(infinite):
    engine = make_engine()
    fill_pool(engine, infinite)
    prompts = random_prompts(5, [1, 3, 4, 5, 8, 9])
    check_greedy(run_all(engine, prompts, greedy(9)), [greedy(9)] * 6)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt length
        st.integers(0, 40),  # max_tokens
        st.integers(0, 12),  # the step at which it arrives
        st.one_of(st.none(), st.integers(0, 30)),  # the step at which it is cancelled
    ),
    min_size=1,
    max_size=9,
)
ENGINES = {chunk_len: make_engine(prefill_chunk_len=chunk_len) for chunk_len in (3, None)}


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(requests=REQUESTS, seed=st.integers(0, 99), chunk_len=st.sampled_from(list(ENGINES)))
def test_random_requests_with_cancels_at_random_steps(requests, seed, chunk_len):
    engine = ENGINES[chunk_len]
    prompts = random_prompts(seed, [length for length, *_ in requests])
    numbers: dict[str, int] = {}

    def act(index: int) -> bool:
        for number, (_, max_tokens, arrives, _) in enumerate(requests):
            if arrives == index:
                numbers[engine.add_request(prompts[number], greedy(max_tokens))] = number
        for request_id, number in numbers.items():
            if requests[number][3] == index:
                engine.cancel(request_id)
        return index <= 12

    outputs = drive(engine, before_step=act)
    assert set(outputs) == set(numbers)
    assert len(numbers) == len(requests)
    for request_id, number in numbers.items():
        last, tokens = outputs[request_id][-1], list(outputs[request_id][-1].token_ids)
        limit = min(requests[number][1], 64 - len(prompts[number]))
        assert tokens == hash_model.expected_greedy(prompts[number], len(tokens))
        if last.finish_reason == "cancelled":
            assert len(tokens) <= limit
        else:
            assert (len(tokens), last.finish_reason) == (limit, "length")
