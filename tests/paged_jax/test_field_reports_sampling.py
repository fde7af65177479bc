"""Faults that users of similar systems met (tests/data/field_reports.json): what requests ask for.

Report B75 (stop strings) is tested in test_engine_sampling.py, B86 (in place) in test_step.py.
"""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from suites import engine_runs, hash_model
from suites.engine_runs import (
    adjusted_logits,
    assert_idle,
    check_greedy,
    check_logprobs,
    drive,
    expected_tokens,
    greedy,
    random_prompts,
    run_all,
    sampled,
)
from suites.small_models import nan_model, rigged_model, scripted_model

from paged_jax import Engine, Model, SamplingParams, count_compilations


def make_engine(model: Model | None = None, **config: Any) -> Engine:
    """One row of prompt a step: fewer programs to compile."""
    return engine_runs.make_engine(model, **{"max_num_batched_tokens": 8, **config})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


# --- seeds


def test_b67_a_seeded_request_ignores_its_neighbours(engine):
    prompts = random_prompts(67, [9, 5, 12, 3])
    seeded, free = sampled(25, seed=42), sampled(25)
    (alone,) = run_all(engine, prompts[:1], seeded)
    runs = [run_all(engine, prompts[:2], [seeded, free])[0] for _ in range(4)]
    runs.append(run_all(engine, prompts, [seeded, free, free, free])[0])
    runs.append(run_all(engine, prompts[::-1], [free, free, free, seeded])[3])
    chunked = make_engine(prefill_chunk_len=2)
    runs.append(run_all(chunked, prompts[:1], seeded)[0])
    # As the latest arrival beside three long ones it is preempted.
    long = random_prompts(68, [20, 20, 20])
    runs.append(run_all(engine, [*long, prompts[0]], [sampled(25)] * 3 + [seeded])[3])
    assert runs[-1].num_preemptions > 0
    assert {run.token_ids for run in runs} == {alone.token_ids}


# --- sampling parameters


def test_b69_extreme_parameters_in_one_batch(engine):
    size = hash_model.VOCAB_SIZE
    params = [sampled(4, seed=9, temperature=t) for t in (0, 1e-8, 1e-5, 1e-4)]
    params += [sampled(4, seed=9, top_p=p) for p in (0, 1e-6, 1)]
    params += [sampled(4, seed=9, top_k=k) for k in (0, -1, 1, size, size + 5)]
    params.append(sampled(4, seed=9, min_p=1.0))
    (prompt,) = random_prompts(69, [5])
    outputs = run_all(engine, [prompt] * len(params), params)
    assert all(len(output.token_ids) == 4 for output in outputs)
    assert all(0 <= token < size for output in outputs for token in output.token_ids)
    best = tuple(expected_tokens(prompt, sampled(4, temperature=0))[0])
    for index in (0, 1, 2, 4, 5, 9, 12):
        assert outputs[index].token_ids == best, params[index]
    # No filter at all: four ways to say so.
    assert len({outputs[index].token_ids for index in (6, 7, 8, 10, 11)}) == 1
    for bad in ({"temperature": -0.1}, {"temperature": np.nan}, {"top_p": 1.1}, {"top_k": -2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_b71_penalties_look_where_they_say(engine):
    """Prompt [5, 5, 6]: repetition counts prompt and output, the others the output only."""
    prompt = [5, 5, 6]
    cases = [
        sampled(40, temperature=0, repetition_penalty=1.9),
        sampled(40, temperature=0, presence_penalty=2.0),
        sampled(40, temperature=0, frequency_penalty=-1.0),
        sampled(40, temperature=0, repetition_penalty=0.4, frequency_penalty=2.0),
    ]
    outputs = run_all(engine, [prompt] * 4, cases)
    check_greedy(outputs, cases)
    assert sum(output.num_preemptions for output in outputs) > 0
    raw = hash_model.expected_logits(prompt)[-1]
    moved = adjusted_logits(raw, prompt, [], dataclasses.replace(cases[0], logit_bias=None))
    assert set(np.flatnonzero(moved != raw)) == {5, 6}
    unmoved = adjusted_logits(raw, prompt, [], dataclasses.replace(cases[1], logit_bias=None))
    np.testing.assert_array_equal(unmoved, raw)


def test_b72_logprobs_do_not_depend_on_temperature_or_filters(engine):
    (prompt,) = random_prompts(72, [6])
    params = [
        sampled(6, seed=1, temperature=0.1),
        sampled(6, seed=1, temperature=2.0),
        sampled(6, seed=1, top_k=1),
        sampled(6, seed=1, temperature=100.0),
    ]
    outputs = run_all(engine, [prompt] * 4, params)
    for output, one in zip(outputs, params, strict=True):
        check_logprobs(output, one)
    assert len({output.logprobs[0].top for output in outputs}) == 1
    hot = outputs[3].logprobs  # the sampled token is there with its rank, outside the top 3 too
    assert max(entry.rank for entry in hot) > 3
    assert [entry.token_id for entry in hot] == list(outputs[3].token_ids)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b74_no_end_of_any_kind_before_min_tokens(ignore_eos):
    """The model prefers 7, then 2, then 9; 2 and 7 are its ends, 9 is a stop token."""
    logits = np.zeros(12)
    logits[[7, 2, 9, 1]] = [4, 3, 2, 1]
    engine = make_engine(rigged_model(logits, eos_token_ids=(2, 7)), max_num_seqs=1)
    ends = {"stop_token_ids": [9], "min_tokens": 5, "ignore_eos": ignore_eos}
    (output,) = run_all(engine, [[0]], greedy(8, **ends))
    if ignore_eos:
        assert (output.token_ids, output.finish_reason) == ((1,) * 5 + (7,) * 3, "length")
    else:
        assert (output.token_ids, output.stop_reason) == ((1,) * 5 + (7,), 7)
    biased = greedy(8, logit_bias={7: -10, 2: -10}, **ends)
    (output,) = run_all(engine, [[0]], biased)
    assert (output.token_ids, output.stop_reason) == ((1,) * 5 + (9,), 9)


# --- identity, degenerate requests


def test_b81_ids(engine):
    engine.add_request([1, 2], greedy(6), request_id="x")
    engine.step()
    with pytest.raises(ValueError, match="request_id='x' must be new"):
        engine.add_request([3], greedy(6), request_id="x")
    outputs = drive(engine)
    assert list(outputs["x"][-1].token_ids) == hash_model.expected_greedy([1, 2], 6)
    # Used again after its end, and in the same step as its cancel, while its token is in flight.
    engine.add_request([4], greedy(6), request_id="x")
    for _ in range(3):
        engine.step()
    assert engine.cancel("x")
    engine.add_request([5, 6], greedy(6), request_id="x")
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    old, new = [output for output in outputs if output.finished]
    assert (old.finish_reason, old.prompt_token_ids) == ("cancelled", (4,))
    assert list(new.token_ids) == hash_model.expected_greedy([5, 6], 6)
    assert_idle(engine)


def test_b83_generate_three_then_five(engine):
    before = copy.deepcopy((engine.config, engine.model.spec, engine.model.eos_token_ids))
    for count in (3, 5):
        prompts = random_prompts(83, range(1, count + 1))
        outputs = engine.generate(prompts, greedy(4))
        assert [list(output.prompt_token_ids) for output in outputs] == prompts
        check_greedy(outputs, [greedy(4)] * count)
    assert before == (engine.config, engine.model.spec, engine.model.eos_token_ids)


# --- recompilation, donation


def test_b84_a_hundred_lengths_compile_nothing_after_the_warm_up():
    # A geometry of its own: nothing is compiled yet.
    geometry = {"num_blocks": 90, "max_model_len": 110, "max_num_seqs": 8, "prefill_row_len": 16}
    prompts = random_prompts(84, range(1, 101))
    with count_compilations() as warm_up:
        engine = make_engine(max_num_batched_tokens=32, **geometry)
        for count in (1, 4, 8):
            run_all(engine, prompts[:count], greedy(3))
    assert 0 < warm_up.count <= engine.executor.max_plain_programs < 12
    with count_compilations() as counted:
        outputs = []
        start = 0
        while start < 100:
            count = 1 + start % 8
            outputs += run_all(engine, prompts[start : start + count], greedy(3))
            start += count
    assert counted.count == 0
    check_greedy(outputs, [greedy(3)] * 100)


def test_b86_donation_never_warns_or_can_be_switched_off():
    """Warnings are errors in all tests; with ``donate=False`` the step keeps its input."""
    for donate in (True, False):
        engine = make_engine(max_num_seqs=1, donate=donate)
        blocks = engine.executor.pool.blocks
        check_greedy(run_all(engine, [[3, 4]], greedy(5)), [greedy(5)])
        assert blocks.is_deleted() == donate


def test_b88_debug_nans():
    (prompt,) = random_prompts(88, [5])
    weights = nan_model()
    with jax.debug_nans(True):
        healthy = make_engine(max_num_seqs=1)
        check_greedy(run_all(healthy, [prompt], greedy(4)), [greedy(4)])
        healthy = make_engine(max_num_seqs=1)
        assert len(run_all(healthy, [prompt], SamplingParams(max_tokens=4))[0].token_ids) == 4
        broken = make_engine(weights, max_num_seqs=1)
        broken.add_request([1, 2], greedy(4))
        with pytest.raises(FloatingPointError):
            drive(broken)
    with pytest.raises(RuntimeError, match="make a new one"):
        broken.step()


def test_b88_disable_jit():
    with jax.disable_jit():
        model = scripted_model([2, 0, 1], vocab_size=4)
        engine = make_engine(model, max_num_seqs=1, attention_backend="reference")
        (output,) = run_all(engine, [[0, 1]], greedy(4))
    assert output.token_ids == (0, 1, 2, 0)
