"""What a user is told of a request, step by step."""

import pytest
from suites.small_models import LettersTokenizer

from paged_jax import PositionLogprobs, SamplingParams
from paged_jax.live_request import LiveCompletion, LiveRequest
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence, SequenceStatus
from paged_jax.text_stream import TextStream

PIECES = ["ab", "cd", "ef", b"\xc3", b"\xa9"]


def make_live(*, has_text: bool = True, **fields) -> LiveRequest:
    params = SamplingParams(**fields)
    request = Request("r", [5, 6, 7], params, eos_token_ids=(4,))
    text = None
    if has_text:
        text = TextStream(
            LettersTokenizer(PIECES).token_bytes,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )
    sequence = Sequence(request, seq_id=0, max_tokens=8)
    return LiveRequest("r", (LiveCompletion(sequence, params, text),), params, (5, 6, 7), 0)


def push(live: LiveRequest, token: int, entry: PositionLogprobs | None = None) -> str | None:
    live.sequence.output_token_ids.append(token)
    return live.take_token(live.sequence, token, entry, live.arrival_time + 1)


def finish(live: LiveRequest, reason: str, stop_reason=None) -> None:
    live.sequence.status = SequenceStatus.FINISHED
    live.sequence.finish_reason, live.sequence.stop_reason = reason, stop_reason


def test_deltas_count_from_the_last_output():
    live = make_live()
    assert live.output().first_token_time is None
    push(live, 0)
    push(live, 1)
    output = live.output()
    assert (output.delta_token_ids, output.delta_text, output.text) == ((0, 1), "abcd", "abcd")
    assert output.first_token_time == live.arrival_time + 1
    assert (output.finish_time, output.finished) == (None, False)
    push(live, 2)
    finish(live, "length")
    output = live.output()
    assert (output.delta_token_ids, output.delta_text, output.text) == ((2,), "ef", "abcdef")
    assert (output.token_ids, output.prompt_token_ids) == ((0, 1, 2), (5, 6, 7))
    assert output.finished
    assert output.finish_time >= live.arrival_time
    assert output.logprobs is None
    assert output.prompt_logprobs is None


def test_held_text_comes_with_the_last_output():
    live = make_live(stop="bx")
    assert push(live, 0) is None
    assert live.output().text == "a"
    finish(live, "length")
    output = live.output()
    assert (output.delta_text, output.text) == ("b", "ab")


def test_half_a_character_waits_for_its_other_half():
    live = make_live()
    push(live, 3)
    assert live.output().text == ""
    push(live, 4)
    assert live.output().delta_text == "é"
    push(live, 3)
    finish(live, "length")
    assert live.output().delta_text == "\ufffd"


def test_a_stop_string_is_reported_with_the_token_that_completes_it():
    live = make_live(stop="bcd")
    assert push(live, 0) is None
    assert push(live, 1) == "bcd"
    finish(live, "stop", "bcd")
    output = live.output()
    assert (output.text, output.token_ids, output.stop_reason) == ("a", (0, 1), "bcd")


def test_an_end_token_adds_no_text():
    live = make_live()
    push(live, 0)
    finish(live, "stop", 4)
    push(live, 1)
    output = live.output()
    assert (output.text, output.token_ids) == ("ab", (0, 1))


def test_logprobs_are_kept_once_for_each_position():
    live = make_live(has_text=False, logprobs=0, prompt_logprobs=0)
    entries = [PositionLogprobs(token, -float(token), 1, ()) for token in range(3)]
    for token in (0, 1):
        push(live, token, entries[token])
    live.take_prompt_entry(2, entries[2])
    live.take_prompt_entry(2, entries[0])  # the prompt was computed again
    output = live.output()
    assert output.text == ""
    assert output.logprobs == tuple(entries[:2])
    assert output.prompt_logprobs == (None, None, entries[2])


@pytest.mark.parametrize("has_text", [True, False])
def test_a_cancelled_request_tells_what_it_had(has_text):
    live = make_live(has_text=has_text)
    push(live, 0)
    finish(live, "cancelled")
    output = live.output()
    assert (output.finish_reason, output.token_ids) == ("cancelled", (0,))
    assert output.text == ("ab" if has_text else "")


def test_a_request_ends_with_the_last_of_its_completions():
    params = SamplingParams(n=2)
    request = Request("r", [5, 6, 7], params, eos_token_ids=(4,))
    completions = tuple(
        LiveCompletion(Sequence(request, seq_id=i, max_tokens=8, sample_index=i), params, None)
        for i in range(2)
    )
    live = LiveRequest("r", completions, params, (5, 6, 7), 0)
    for token, completion in ((1, completions[0]), (2, completions[1])):
        completion.sequence.output_token_ids.append(token)
        live.take_token(completion.sequence, token, None, live.arrival_time)
    finish(live, "length")
    output = live.output()
    assert [completion.token_ids for completion in output.outputs] == [(1,), (2,)]
    assert [completion.finish_reason for completion in output.outputs] == ["length", None]
    assert (output.finish_reason, output.finished, output.finish_time) == ("length", False, None)
    second = completions[1].sequence
    second.status, second.finish_reason = SequenceStatus.FINISHED, "stop"
    assert live.output().finished
    assert [completion.delta_token_ids for completion in live.output().outputs] == [(), ()]
