import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from paged_jax.sampling.params import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = {
    "n": [0, -1, 1.0, True, None],
    "best_of": [0, 1.0, True],
    "temperature": [-0.1, NAN, INF, 1e39, True, "1", None],
    "top_k": [-2, 1.5, True, None],
    "top_p": [-0.01, 1.01, NAN, None],
    "min_p": [-0.01, 1.01, NAN],
    "repetition_penalty": [0, -1.0, 10.5, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [
        {-1: 1.0},
        {1: 101},
        {1: NAN},
        {"5": 1.0},
        {True: 1.0},
        [(1, 1.0)],
        ((1, 1.0), (1, 2.0)),
        ((1,),),
        dict.fromkeys(range(301), 0.0),
    ],
    "seed": [-1, 2**64, 1.0, True],
    "max_tokens": [-1, 1.0, True],
    "min_tokens": [-1, None, 17],
    "stop": ["", ["a", ""], 5, [5], None, b"ab", [b"ab"]],
    "stop_token_ids": [[-1], [True], "12", 7, None, range(129)],
    "ignore_eos": [1, None],
    "include_stop_str_in_output": ["yes"],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21, 1.0],
}

ACCEPTED = {
    "n": [1, 100, np.int64(2)],
    "best_of": [None, 1, 100],
    "temperature": [0, 1e-8, 2.0, 1e6, np.float32(0.5)],
    "top_k": [-1, 0, 1, 10**12, np.int64(5)],
    "top_p": [0, 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.1, 10],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [None, {}, {0: -100, 5: 100}, dict.fromkeys(range(300), 0.0)],
    "seed": [None, 0, 2**64 - 1],
    "max_tokens": [None, 0, 1],
    "stop": [(), "x", ["a", "b"]],
    "stop_token_ids": [(), [3, 3, 1], range(128)],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_refuses_what_is_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values]
)
def test_accepts_the_fields_usual_ranges(name, value):
    params = SamplingParams(**{name: value})
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params) == params


def test_fields_are_kept_in_one_form():
    params = SamplingParams(stop="end", stop_token_ids=[9, 2, 9], logit_bias={4: 1, 2: -3})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (2, 9)
    assert params.logit_bias == params.bias_pairs == ((2, -3.0), (4, 1.0))
    assert SamplingParams().bias_pairs == ()


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=50, max_tokens=None).min_tokens == 50
    with pytest.raises(ValueError, match=r"min_tokens=5 must be at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_greedy_and_penalties():
    assert SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
    assert not SamplingParams().needs_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).needs_penalties


def test_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).validate_for(10)
    with pytest.raises(ValueError, match=r"logit_bias ids \[10\] .* 10"):
        SamplingParams(logit_bias={10: 1.0}).validate_for(10)
    with pytest.raises(ValueError, match=r"stop_token_ids ids \[11\]"):
        SamplingParams(stop_token_ids=[11]).validate_for(10)


def test_params_do_not_import_jax():
    code = "import sys, paged_jax.sampling.params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_samples_and_their_ranking():
    assert SamplingParams(n=3).num_samples == SamplingParams(n=2, best_of=3).num_samples == 3
    assert SamplingParams(n=2, best_of=3).is_ranked
    assert not SamplingParams(n=3, best_of=3).is_ranked
    assert SamplingParams(best_of=2).num_logprobs == 0
    assert SamplingParams(best_of=2, logprobs=4).num_logprobs == 4
    assert SamplingParams(n=2, best_of=2).num_logprobs is None
    with pytest.raises(ValueError, match="best_of=2 must be at least n=3"):
        SamplingParams(n=3, best_of=2)
    for fields in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(ValueError, match=r"must be 1 or None with max_tokens=0: nothing"):
            SamplingParams(max_tokens=0, **fields)


def test_beams_have_no_use_for_chance():
    params = SamplingParams(beam_width=4, n=2, early_stopping="never", length_penalty=-1)
    assert params.is_greedy
    assert not params.is_ranked
    assert (params.num_samples, params.num_logprobs) == (4, None)
    assert SamplingParams(beam_width=1, temperature=0, early_stopping=True).num_samples == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be an integer >= 1"),
        ({"n": 3}, "n=3 must be at most beam_width=2"),
        ({"best_of": 2}, "best_of=2 must be None with beam_width=2"),
        ({"temperature": 0.5}, "temperature=0.5 must be 0 or 1 with beam_width=2: beams are"),
        ({"top_k": 5}, "top_k=5 must be 0 with"),
        ({"top_p": 0.5}, "top_p=0.5 must be 1 with"),
        ({"min_p": 0.5}, "min_p=0.5 must be 0 with"),
        ({"repetition_penalty": 1.5}, "repetition_penalty=1.5 must be 1 with"),
        ({"presence_penalty": 1}, "presence_penalty=1.0 must be 0 with"),
        ({"frequency_penalty": 1}, "frequency_penalty=1.0 must be 0 with"),
        ({"logprobs": 0}, "logprobs=0 must be None with"),
        ({"stop": "x"}, r"stop=\('x',\) must be \(\) with"),
        ({"max_tokens": 0}, "max_tokens=0 must be >= 1 with beam_width=2"),
        ({"length_penalty": 11}, "length_penalty=11 must be a number >= -10 and <= 10"),
        ({"early_stopping": 1}, "early_stopping=1 must be True, False or 'never'"),
        ({"beam_width": None, "length_penalty": 2}, "must be 1.0 and False without beam_width"),
        ({"beam_width": None, "early_stopping": True}, "must be 1.0 and False without beam_width"),
    ],
)
def test_refuses_what_means_nothing_with_beams(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"beam_width": 2, **fields})
