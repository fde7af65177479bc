from pathlib import Path

import pytest

from paged_jax.simulation.traces import TraceRequest, read_trace

TRACE = Path(__file__).parents[2] / "data" / "prefix_trace.csv"


def test_lengths_and_ids():
    requests = read_trace(TRACE)
    assert len(requests) == 10
    assert requests[0] == TraceRequest(10, 3, (0, 1, 2))
    assert requests[1] == TraceRequest(12, 2, (0, 1, 3))
    assert requests[5] == TraceRequest(16, 5, (4, 5, 6, 7))
    assert read_trace(TRACE, max_requests=3) == requests[:3]


def test_shorter_lengths_are_rounded_up():
    assert read_trace(TRACE, divide_by=3, max_requests=1) == [TraceRequest(4, 1, (0, 1, 2))]


def test_ids_become_tokens_of_their_own():
    request = TraceRequest(7, 1, (3, 0))
    assert request.token_ids(4) == [12, 13, 14, 15, 0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "prompt_tokens\n3\n",
        "prompt_tokens,output_tokens\n3,x\n",
        "prompt_tokens,output_tokens\n3\n",
    ],
)
def test_not_a_trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"must have whole prompt_tokens and output_tokens"):
        read_trace(path)


def test_bad_ids(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens,hash_ids\n3,1,0-a\n")
    with pytest.raises(ValueError, match=r"hash_ids like '0 14-27', not .*'0-a'"):
        read_trace(path)


def test_empty(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n")
    with pytest.raises(ValueError, match=r"trace.csv' must hold at least one request"):
        read_trace(path)
