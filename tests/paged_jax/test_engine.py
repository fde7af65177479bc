"""The ways to use an engine, and what it refuses."""

import types
from typing import Any

import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import (
    assert_idle,
    check_greedy,
    drive,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)
from suites.small_models import letters, nan_model, scripted_model

from paged_jax import Engine, EngineConfig, EngineStats, SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest):
    yield
    if "engine" in request.fixturenames:
        assert_idle(request.getfixturevalue("engine"))


# --- generate


def test_generate_twice_gives_results_in_the_order_of_the_prompts(engine):
    params = [greedy(3), greedy(9), greedy(1), greedy(5), greedy(2)]
    for count in (3, 5):
        prompts = random_prompts(count, range(count, 0, -1))
        outputs = engine.generate(prompts, params[:count])
        assert [list(output.prompt_token_ids) for output in outputs] == prompts
        check_greedy(outputs, params[:count])


def test_generate_takes_one_prompt_arrays_or_none_at_all(engine):
    (prompt,) = random_prompts(7, [6])
    alone = engine.generate(prompt, greedy(4))
    check_greedy(alone, [greedy(4)])
    arrays = [np.array(prompt), np.array(prompt, np.uint8), np.array(prompt, np.int64)]
    outputs = [
        alone[0],
        *engine.generate(arrays, greedy(4)),
        *engine.generate(arrays[0], greedy(4)),
    ]
    assert {output.token_ids for output in outputs} == {alone[0].token_ids}
    assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []


def test_text_prompts_need_a_tokenizer_and_yield_text(engine):
    with pytest.raises(ValueError, match="prompt is text, but the model has no tokenizer"):
        engine.generate("abc")
    model = scripted_model([2, 0, 1], vocab_size=4, tokenizer=letters(4))
    rigged = make_engine(model, max_num_seqs=1, max_num_batched_tokens=8)
    outputs = rigged.generate(["a", "ab"], greedy(4))
    assert [output.text for output in outputs] == ["cabc", "abca"]
    assert rigged.generate("a", greedy(2))[0].text == "ca"


def test_default_parameters_are_those_of_sampling_params(engine):
    for request_id in engine.add_requests([[1, 2, 3], [4]]):
        assert engine._by_id[request_id].params == SamplingParams()
        engine.cancel(request_id)
    assert len(drive(engine)) == 2


# --- step, cancel, ids


def test_outputs_of_manual_requests_survive_a_generate_in_between(engine):
    prompts = random_prompts(8, [9, 4, 6])
    manual = [engine.add_request(prompt, greedy(6)) for prompt in prompts[:2]]
    check_greedy(engine.generate(prompts[2:], greedy(20)), [greedy(20)])
    outputs = drive(engine)
    assert set(outputs) == set(manual)
    check_greedy([outputs[request_id][-1] for request_id in manual], [greedy(6)] * 2)


def test_made_ids_avoid_those_in_use(engine):
    first = engine.add_request([1], greedy(2))
    number = int(first.removeprefix("request-"))
    engine.add_request([2], greedy(2), request_id=f"request-{number + 1}")
    assert engine.add_request([3], greedy(2)) == f"request-{number + 2}"
    assert len(drive(engine)) == 3


def test_an_id_that_is_used_again_gives_its_own_outputs(engine):
    """Not those of the request that had it before, which nobody has taken yet."""
    prompts = random_prompts(80, [4, 6, 5])
    first = engine.add_request([1], greedy(1))
    number = int(first.removeprefix("request-"))
    waiting = f"request-{number + 2}"
    engine.add_request(prompts[0], greedy(2), request_id=waiting)
    engine.generate(prompts[1], greedy(9))  # takes number + 1, and ends the others beside it
    assert not engine._by_id
    check_greedy(engine.generate(prompts[2:], greedy(4)), [greedy(4)])
    engine.add_request(prompts[2], greedy(3), request_id=waiting)
    outputs = list(engine.run(waiting))
    check_greedy(outputs[-1:], [greedy(3)])
    assert {output.prompt_token_ids for output in outputs} == {tuple(prompts[2])}
    old = engine.step()
    assert {output.request_id for output in old} == {first, waiting}
    assert (1, tuple(prompts[0])) == (sum(o.finished for o in old[1:]), old[-1].prompt_token_ids)
    engine.add_request(prompts[0], greedy(20), request_id="again")
    engine.step()
    engine.cancel("again")
    engine.add_request(prompts[2], greedy(3), request_id="again")
    outputs = list(engine.run("again"))
    check_greedy(outputs[-1:], [greedy(3)])
    assert {output.finish_reason for output in drive(engine)["again"]} == {"cancelled"}
    # Nor does a stream that is closed take the other's last output with it.
    engine.add_request(prompts[0], greedy(20), request_id="again")
    engine.step()
    engine.cancel("again")
    engine.add_request(prompts[2], greedy(20), request_id="again")
    stream = engine.run("again")
    next(stream)
    stream.close()
    (old,) = engine.step()
    assert (old.prompt_token_ids, old.finish_reason) == (tuple(prompts[0]), "cancelled")


def test_a_closed_stream_leaves_an_idle_engine(engine):
    for params in (greedy(20), greedy(20, n=3)):
        stream = engine.stream([[1, 2, 3], [4, 5]], params)
        next(stream)
        stream.close()
        assert not engine.has_unfinished
        assert_idle(engine)
        assert engine.block_manager.stats().used == 0


@pytest.mark.parametrize("num_steps", range(8))
def test_cancel_in_every_state_frees_the_blocks_and_spares_the_others(engine, num_steps):
    prompts = random_prompts(num_steps, [40, 3, 20, 30, 5, 6])
    ids = engine.add_requests(prompts, greedy(20))

    def cancel(index: int) -> None:
        if index == num_steps:
            for request_id in ids[::2]:
                engine.cancel(request_id)
                assert not engine.cancel(request_id)
            engine.scheduler.check_integrity()

    outputs = drive(engine, before_step=cancel)
    for index, request_id in enumerate(ids):
        last = outputs[request_id][-1]
        tokens = list(last.token_ids)
        assert tokens == hash_model.expected_greedy(prompts[index], len(tokens))
        if index % 2 and last.finish_reason != "cancelled":
            assert (len(tokens), last.finish_reason) == (20, "length")
    assert not engine.cancel("nobody")


def test_has_unfinished_until_the_last_output_is_given(engine):
    assert not engine.has_unfinished
    request_id = engine.add_request([5], greedy(3))
    assert engine.has_unfinished
    engine.cancel(request_id)
    assert engine.has_unfinished
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == (request_id, "cancelled")
    assert not engine.has_unfinished
    assert engine.step() == []


def test_a_request_of_no_tokens_only_scores_its_prompt(engine):
    (prompt,) = random_prompts(9, [13])
    (output,) = run_all(engine, [prompt], greedy(0, prompt_logprobs=0))
    assert (output.token_ids, output.finish_reason) == ((), "length")
    assert output.first_token_time is None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 13


# --- refusals

REFUSED: list[tuple[Any, Any, str]] = [
    ([], None, r"prompt_token_ids=\[\] must hold at least one token"),
    ([1, 251], None, r"prompt has token ids \[251\] outside 0..250"),
    ([-1], None, r"prompt has token ids \[-1\] outside 0..250"),
    ([2**70], None, r"outside 0..250"),
    ([1.0], None, r"prompt=\[1.0\] must be a string or a flat list of token ids"),
    ([True], None, r"prompt=\[True\] must be a string"),
    ([[1, 2], [3]], None, r"prompt=\[\[1, 2\], \[3\]\] must be a string"),
    (None, None, r"prompt=None must be a string"),
    (7, None, r"prompt=7 must be a string"),
    ([1] * 64, None, "a prompt of 64 tokens must leave room for one new token in max_model_len=64"),
    ([1] * 65, SamplingParams(max_tokens=0), "prompt of 65 tokens must leave room for itself"),
    ([1], SamplingParams(logit_bias={251: 1}), r"logit_bias ids \[251\] must be below"),
    ([1], SamplingParams(stop_token_ids=[300]), r"stop_token_ids ids \[300\] must be below"),
    ([1], SamplingParams(stop="x"), r"stop=\('x',\) needs a model with a tokenizer"),
    ([1], types.SimpleNamespace(), r"params=namespace\(\) must be SamplingParams or None"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED)
def test_add_request_refuses(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    assert_idle(engine)


def test_a_refused_batch_leaves_nothing_in_the_engine(engine):
    running = engine.add_request([1, 2, 3], greedy(9))
    engine.step()
    for prompts, params, message in (
        ([[1], [2], []], None, "must hold at least one token"),
        ([[1], [2]], [greedy(1)], r"params has 1 entries, must have one a prompt \(2\)"),
        ([[1], [2]], [greedy(1), "greedy"], "params='greedy' must be SamplingParams or None"),
        ([[1], [999]], greedy(1), r"token ids \[999\] outside"),
    ):
        for method in (engine.generate, engine.stream, engine.add_requests):
            with pytest.raises(ValueError, match=message):
                method(prompts, params)
        assert engine.scheduler.num_waiting == 0
    assert set(drive(engine)) == {running}


def test_max_model_len_must_fit_the_model():
    with pytest.raises(ValueError, match="max_model_len=4096 must be at most the model's 2048"):
        make_engine(max_model_len=4096)
    assert make_engine(max_model_len=None).max_model_len == 64  # the pool's


# --- a broken step, counters


def test_nan_logits_stop_the_engine_for_good():
    engine = make_engine(nan_model(), check_logits=True)
    request_id = engine.add_request([1, 2], greedy(4))
    with pytest.raises(FloatingPointError, match=f"NaN logits for {request_id}"):
        drive(engine)
    for call in (
        engine.step,
        lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.stream([[1]]),
    ):
        with pytest.raises(RuntimeError, match=r"FloatingPointError.*make a new one"):
            call()


def test_without_check_logits_nan_ends_in_tokens_of_the_vocabulary():
    (output,) = make_engine(nan_model()).generate([[1, 2]], greedy(4))
    assert all(0 <= token < 8 for token in output.token_ids)


def test_stats_count_what_was_done_and_reset_to_zero(engine):
    prompts = random_prompts(10, [20, 20, 20, 20])
    engine.stats.reset()
    assert engine.stats == EngineStats()
    outputs = run_all(engine, prompts, greedy(24))
    stats = engine.stats
    assert stats.num_output_tokens == sum(len(output.token_ids) for output in outputs) == 96
    assert stats.num_preemptions == sum(output.num_preemptions for output in outputs) > 0
    assert stats.num_prompt_tokens > 80  # recomputed ones too
    assert stats.peak_used_blocks <= engine.num_blocks - 1
    assert 0.75 < stats.block_utilisation <= 1
    assert 0 < stats.padding_share < 1
    assert 0 < stats.schedule_seconds + stats.pack_seconds < stats.step_seconds
    stats.reset()
    run_all(engine, prompts[:1], greedy(2))
    assert stats.num_preemptions == 0
    assert stats.num_output_tokens == 2
    assert stats.num_copied_blocks == 0


def test_an_engine_needs_no_configuration():
    engine = Engine(scripted_model([1, 2], vocab_size=4))
    assert engine.config == EngineConfig()
    assert engine.num_blocks == 1 + 32 * 1024 // 16
    assert engine.max_model_len == 1024
    assert engine.generate([0], greedy(3))[0].token_ids == (1, 2, 1)


def test_a_second_thread_inside_a_step_is_told_and_the_engine_lives():
    engine = make_engine()
    engine.add_request([1, 2])
    with engine._stepping, pytest.raises(RuntimeError, match="one thread at a time"):
        engine.step()
    assert engine.run(["request-0"]) is not None
    assert len(engine.generate([3, 4])) == 1


def test_run_takes_one_id_and_refuses_unknown_ones():
    engine = make_engine()
    request_id = engine.add_request([1, 2])
    with pytest.raises(ValueError, match=r"request_ids \['nope'\] are not in the engine"):
        engine.run(["nope"])
    assert [output.finished for output in engine.run(request_id)][-1]


def test_a_refused_prompt_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*must hold at least one token"):
        make_engine().generate([[1], []])
