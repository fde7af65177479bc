"""Sampling through the engine: the same tokens whatever the batch, and what parameters mean."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from suites import engine_runs, hash_model
from suites.engine_runs import (
    check_greedy,
    check_logprobs,
    check_outputs,
    drive,
    expected_tokens,
    fill_pool,
    greedy,
    random_prompts,
    run_all,
    sampled,
)
from suites.small_models import LettersTokenizer, letters, rigged_model, scripted_model

from paged_jax import Engine, Model, RequestOutput, SamplingParams


def make_engine(model: Model | None = None, **config: Any) -> Engine:
    """One row of prompt a step: fewer programs to compile."""
    return engine_runs.make_engine(model, **{"max_num_batched_tokens": 8, **config})


PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4}
PARAMS = [
    sampled(seed=1),
    sampled(seed=2, temperature=5.0, top_k=20, top_p=0.7),
    sampled(seed=3, min_p=0.01, **PENALISED),
    sampled(seed=2**64 - 1, logit_bias={7: 4.0, 250: -100}),
    sampled(seed=5, temperature=0.7, min_tokens=9, stop_token_ids=[3, 5]),
    sampled(seed=6, temperature=20.0, repetition_penalty=0.5),
]
PROMPTS = random_prompts(0, [7, 1, 12, 4, 9, 17])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def alone(engine) -> list[tuple[int, ...]]:
    """Each request's tokens when it has the engine to itself."""
    outputs = [run_all(engine, [p], one)[0] for p, one in zip(PROMPTS, PARAMS, strict=True)]
    return [output.token_ids for output in outputs]


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


# --- seeds


def test_seeded_tokens_are_the_same_whatever_else_runs(engine, alone):
    assert tokens_of(run_all(engine, PROMPTS, PARAMS)) == alone
    assert tokens_of(run_all(engine, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]
    fill_pool(engine, np.nan)
    others = [sampled(30), sampled(30, temperature=0.0, **PENALISED), sampled(20)]
    outputs = run_all(engine, random_prompts(8, [3, 20, 9]) + PROMPTS, others + PARAMS)
    assert tokens_of(outputs)[3:] == alone
    check_greedy(outputs[1:2], others[1:2])
    assert sum(output.num_preemptions for output in outputs) > 0


def test_seeded_tokens_survive_chunks_and_preemption(alone):
    engine = make_engine(prefill_chunk_len=3)
    longer = [dataclasses.replace(one, max_tokens=40, min_tokens=0) for one in PARAMS]
    for _ in range(2):
        outputs = run_all(engine, PROMPTS, longer)
        # min_tokens changes which tokens may come: compare the others.
        for index in (0, 1, 2, 3, 5):
            assert outputs[index].token_ids[:14] == alone[index]
    assert engine.stats.num_preemptions > 3
    tight = run_all(engine, PROMPTS, longer)
    one_by_one = [run_all(engine, [p], one)[0] for p, one in zip(PROMPTS, longer, strict=True)]
    assert tokens_of(tight) == tokens_of(one_by_one)


def test_seeds_matter_and_unseeded_requests_differ_but_repeat_with_the_engine(engine):
    prompt = PROMPTS[0]
    seeded = [sampled(10, seed=seed) for seed in (1, 1, 2)]
    one, same, other = tokens_of(run_all(engine, [prompt] * 3, seeded))
    assert one == same != other
    free = sampled(10)
    runs = []
    for seed in (0, 0, 1):
        fresh = make_engine(seed=seed)
        runs.append(tokens_of(run_all(fresh, [prompt] * 3, free) + run_all(fresh, [prompt], free)))
    assert runs[0] == runs[1] != runs[2]
    assert len({*runs[0], *runs[2]}) == 8


def test_sampled_tokens_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    engine = make_engine(rigged_model(logits), max_num_seqs=1)
    params = [SamplingParams(seed=seed, max_tokens=50) for seed in range(40)]
    tokens = np.concatenate(tokens_of(run_all(engine, [[0]] * 40, params)))
    shares = np.bincount(tokens, minlength=4) / tokens.size
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.04)  # 2000 draws: 3.6 sigma


# --- biases, penalties, ends


def test_greedy_tokens_obey_the_formulas_of_bias_and_penalties_after_preemption_too():
    engine = make_engine()
    params = [
        sampled(40, temperature=0, **PENALISED),
        sampled(40, temperature=0, logit_bias=dict.fromkeys(range(0, 80, 9), 3.5)),
        sampled(40, temperature=0, presence_penalty=-1.5, frequency_penalty=2.0),
        sampled(40, temperature=0, presence_penalty=2.0, repetition_penalty=0.8),
        sampled(40, temperature=0, frequency_penalty=-2.0),
        sampled(12, temperature=0, min_tokens=12, stop_token_ids=range(0, 251, 18)),
    ]
    outputs = run_all(engine, PROMPTS, params)
    check_greedy(outputs, params)
    assert engine.stats.num_preemptions > 0


@pytest.mark.long
def test_hundreds_of_biases():
    params = greedy(5, logit_bias=dict.fromkeys(range(1, 251), -100.0))
    (output,) = run_all(make_engine(max_num_seqs=1), PROMPTS[:1], params)
    assert output.token_ids == (0,) * 5


@pytest.mark.parametrize("min_tokens", [0, 5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends(min_tokens, ignore_eos):
    eos = (2, 7)
    engine = make_engine(hash_model.make_model(eos_token_ids=eos), max_num_seqs=1)
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=range(9, 22),
    )
    outputs = run_all(engine, PROMPTS, params)
    for output in outputs:
        tokens, reason = expected_tokens(output.prompt_token_ids, params, eos=eos)
        assert (list(output.token_ids), output.finish_reason) == (tokens, reason)
        assert output.stop_reason == (tokens[-1] if reason == "stop" else None)
        assert len(tokens) >= min_tokens
    assert "stop" in {output.finish_reason for output in outputs}


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens", "reason"),
    [
        ("bcd", "a", 2, "bcd"),
        ("f", "abcde", 3, "f"),
        ("zz", "abcdefabcdef", 6, None),
        (["cd", "bc"], "a", 2, "bc"),
        ("efab", "abcd", 4, "efab"),
        ("fabcdefz", "abcdefabcdef", 6, None),
    ],
)
def test_b75_stop_strings_across_tokens(stop, text, num_tokens, reason):
    tokenizer = LettersTokenizer(["ab", "cd", "ef", "-"])
    engine = make_engine(
        scripted_model([0, 1, 2], vocab_size=4, tokenizer=tokenizer), max_num_seqs=1
    )
    outputs = list(engine.stream([[3]], greedy(6, stop=stop)))
    check_outputs(outputs)
    last = outputs[-1]
    assert (last.text, len(last.token_ids), last.stop_reason) == (text, num_tokens, reason)
    assert last.finish_reason == ("length" if reason is None else "stop")
    included = greedy(6, stop=stop, include_stop_str_in_output=True)
    (output,) = engine.generate([[3]], included)
    assert output.text == text + (reason or "")


def test_a_stop_string_that_ends_with_the_last_token_wins_over_length():
    engine = make_engine(
        scripted_model([0, 1, 2], vocab_size=3, tokenizer=letters(3)), max_num_seqs=1
    )
    (output,) = engine.generate([[0]], greedy(3, stop="bc"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bc")


def test_a_stop_string_drops_the_token_in_flight():
    """The device has gone one step on; nobody sees that token, and its block is free."""
    engine = make_engine(
        scripted_model([0, 1, 2], vocab_size=3, tokenizer=letters(3)), max_num_seqs=1
    )
    engine.stats.reset()
    (output,) = run_all(engine, [[0]], greedy(10, stop="b"))
    assert output.token_ids == (0, 1)
    assert engine.stats.num_output_tokens == 2
    assert engine.stats.num_steps == 3


# --- log-probabilities


@pytest.mark.parametrize("chunk_len", [3, None])
def test_logprobs_are_raw_log_softmax_whatever_is_sampled(chunk_len):
    engine = make_engine(prefill_chunk_len=chunk_len)
    params = [
        sampled(30, seed=1, logprobs=3, temperature=0.1),
        sampled(30, seed=2, logprobs=1, prompt_logprobs=2, top_k=1),
        sampled(30, seed=3, logprobs=5, prompt_logprobs=3, temperature=0.5, **PENALISED),
        sampled(30, seed=4, temperature=9.0),
        sampled(0, prompt_logprobs=5),
        sampled(30, seed=6, logprobs=2, logit_bias={8: 9.0}, prompt_logprobs=5),
    ]
    outputs = run_all(engine, PROMPTS, params)
    for output, one in zip(outputs, params, strict=True):
        check_logprobs(output, one)
    assert engine.stats.num_preemptions > 0  # recomputed prompts change nothing


def test_more_logprobs_than_the_vocabulary_has_tokens():
    engine = make_engine(rigged_model([0.0, 1.0, 2.0]), max_num_seqs=1)
    (output,) = run_all(engine, [[0, 1]], greedy(2, logprobs=20, prompt_logprobs=20))
    entries = [*(output.logprobs or ()), (output.prompt_logprobs or ())[1]]
    assert [[token for token, _ in entry.top] for entry in entries if entry] == [[2, 1, 0]] * 3


def test_entries_grow_with_the_stream(engine):
    ids = engine.add_requests(PROMPTS[:1], sampled(5))
    for output in drive(engine)[ids[0]]:
        assert len(output.logprobs or ()) == len(output.token_ids)
