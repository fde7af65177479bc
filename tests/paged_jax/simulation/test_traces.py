import csv
import gzip
import json
import math
import re
from pathlib import Path

import pytest

from paged_jax.simulation.traces import TraceRequest, find_tokens_per_id, read_trace

TRACE = Path(__file__).parents[2] / "data" / "prefix_trace.csv"
OURS = "prompt_tokens,output_tokens\n"
TIMED = "arrival_s,prompt_tokens,output_tokens,hash_ids\n"
MOONCAKE = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}


@pytest.fixture
def write(tmp_path):
    """``write(text)``: a file's path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_lengths_and_ids():
    requests = read_trace(TRACE)
    assert len(requests) == 10
    assert requests[0] == TraceRequest(10, 3, (0, 1, 2))
    assert requests[1] == TraceRequest(12, 2, (0, 1, 3), arrival=0.5)
    assert requests[5] == TraceRequest(16, 5, (4, 5, 6, 7), arrival=2.5)
    assert read_trace(TRACE, max_requests=3) == requests[:3]


def test_shorter_lengths_are_rounded_up():
    assert read_trace(TRACE, divide_by=3, max_requests=1) == [TraceRequest(4, 1, (0, 1, 2))]


def test_ids_become_tokens_of_their_own():
    request = TraceRequest(7, 1, (3, 0))
    assert request.token_ids(4) == [12, 13, 14, 15, 0, 1, 2]


FORMATS = {
    "ours": f"{TIMED}2.5,10,3,\n2.5,9,2,7-8\n4.0,1,1,5\n",
    "other order, other columns": (
        "output_tokens,session,hash_ids,prompt_tokens,arrival_s\n"
        '3,"a,b",,10,0\n2,,7-8,9,0.0\n1,c,5,1,1.5\n'
    ),
    "JSON": "\n".join(
        json.dumps({"arrival_s": time, "prompt_tokens": p, "output_tokens": o, "hash_ids": ids})
        for time, p, o, ids in ((7, 10, 3, ""), (7, 9, 2, "7-8"), (8.5, 1, 1, [5]))
    ),
    "Azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 23:59:58.9799600,10,3\r\n2023-11-16 23:59:58.9799600,9,2\r\n"
        "2023-11-17 00:00:00.4799600,1,1"
    ),
    "Azure, with zones": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,10,3\n"
        "2024-05-10 00:00:00.009930+00:00,9,2\n2024-05-10 02:00:01.509930+02:00,1,1\n"
    ),
    "Mooncake": "\n\n".join(
        json.dumps(
            {"timestamp": time, "input_length": p, "output_length": o, "hash_ids": ids, "x": None}
        )
        for time, p, o, ids in ((27000, 10, 3, []), (27000, 9, 2, [7, 8]), (28500, 1, 1, [5]))
    ),
    "Etalon": "num_prefill_tokens,num_decode_tokens,pd_ratio\n10,3,3.3\n9,2,4.5\n1,1,1.0\n",
    "Vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n1,10,3\n1,9,2\n2.5,1,1\n",
    "chats": (
        "conv_id,turn,prompt_tokens,new_tokens,output_tokens\n0,0,10,10,3\n0,1,9,1,2\n1,0,1,1,1\n"
    ),
}
WITH_IDS = {"ours", "other order, other columns", "JSON", "Mooncake"}
WITHOUT_TIMES = {"Etalon", "chats"}


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(write, name, is_gzip):
    ids = [(), (7, 8), (5,)] if name in WITH_IDS else [()] * 3
    times = [0.0] * 3 if name in WITHOUT_TIMES else [0.0, 0.0, 1.5]
    content = FORMATS[name].encode()
    path = write(gzip.compress(content) if is_gzip else content)
    lens = [(10, 3), (9, 2), (1, 1)]
    assert read_trace(path) == [
        TraceRequest(*one, *rest) for one, *rest in zip(lens, ids, times, strict=True)
    ]


def test_a_byte_order_mark_and_blank_lines_are_passed_over(write):
    assert read_trace(write("\ufeff\n" + OURS + "\n 3 ,1\n\n")) == [TraceRequest(3, 1)]


def test_rows_that_are_not_wanted_are_not_looked_at(write):
    path = write(OURS + "3,1\nx,y\n")
    assert read_trace(path, max_requests=1) == [TraceRequest(3, 1)]


MALFORMED = {
    "empty": ("", r"must hold at least one request"),
    "blank": ("\n \n", r"must hold at least one request"),
    "header alone": (OURS, r"must hold at least one request"),
    "unknown columns": ("a,b\n1,2\n", r"line 1: columns \['a', 'b'\] must include prompt_tokens, "),
    "no header": ("3,1\n", r"line 1: columns \['3', '1'\] must include prompt_tokens, "),
    "missing column": ("prompt_tokens\n3\n", r"line 1: columns \['prompt_tokens'\] must include "),
    "untimed Azure": (
        "ContextTokens,GeneratedTokens\n3,1\n",
        r"line 1: columns .* must include .*TIMESTAMP, ContextTokens, GeneratedTokens; or timesta",
    ),
    "column twice": (
        "prompt_tokens,output_tokens,prompt_tokens\n3,1,3\n",
        r"line 1: columns \['prompt_tokens'\] must each be there once",
    ),
    "short row": (OURS + "3,1\n3\n", r"line 3: output_tokens is missing: \['3'\] must have a valu"),
    "long row": (OURS + "3,1,2\n", r"line 2: .* must have one value a column \(2\)"),
    "quote": (OURS + '3,1\n"3"x,1\n', r"line 3: .*expected after"),
    "text": (OURS + "3,1\n\n3,x\n", r"line 4: output_tokens='x' must be an integer >= 1"),
    "nothing": (OURS + ",1\n", r"line 2: prompt_tokens='' must be an integer >= 1"),
    "fraction": (OURS + "3.5,1\n", r"line 2: prompt_tokens='3.5' must be an integer >= 1"),
    "underscore": (OURS + "1_0,1\n", r"line 2: prompt_tokens='1_0' must be"),
    "other digits": (OURS + "\u0663,1\n", r"line 2: prompt_tokens='\u0663' must be"),
    "negative": (OURS + "-3,1\n", r"line 2: prompt_tokens='-3' must be an integer >= 1"),
    "no prompt": (OURS + "0,1\n", r"line 2: prompt_tokens='0' must be an integer >= 1"),
    "no output": (OURS + "3,0\n", r"line 2: output_tokens='0' must be an integer >= 1"),
    "endless digits": (OURS + "9" * 5000 + ",1\n", r"line 2: prompt_tokens='9+\.\.\. must be"),
    "time text": (TIMED + "x,3,1,\n", r"line 2: arrival_s='x' must be a number >= 0"),
    "time NaN": (TIMED + "nan,3,1,\n", r"line 2: arrival_s='nan' must be a number >= 0"),
    "time inf": (TIMED + "inf,3,1,\n", r"line 2: arrival_s='inf' must be a number >= 0"),
    "time below 0": (TIMED + "-1,3,1,\n", r"line 2: arrival_s='-1' must be a number >= 0"),
    "unordered": (
        TIMED + "5,3,1,\n6,3,1,\n5.5,3,1,\n",
        r"line 4: arrival_s='5.5' must not be before the row above's",
    ),
    "no date": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:03,3,1\n",
        r"line 2: TIMESTAMP='2023-13-16 18:17:03' must be a time as in '2023-11-16 18:17:03.97",
    ),
    "id text": (TIMED + "0,3,1,0-a\n", r"line 2: hash_ids='0-a' must be ids .* as in '0 14-27'"),
    "id list": (TIMED + '0,3,1,"[0, 1]"\n', r"line 2: hash_ids='\[0, 1\]' must be ids"),
    "id below 0": (TIMED + "0,3,1,-1\n", r"line 2: hash_ids='-1' must be ids"),
    "backwards": (TIMED + "0,3,1,2-1\n", r"line 2: hash_ids='2-1' must be ids"),
    "half a range": (TIMED + "0,3,1,2-\n", r"line 2: hash_ids='2-' must be ids"),
    "huge range": (TIMED + "0,3,1,0-99999999999999\n", r"hash_ids=.* at most one a prompt token"),
    "immense range": (TIMED + f"0,3,1,0-{10**30}\n", r"line 2: hash_ids=.* must be ids"),
    "huge id": (TIMED + f"0,3,1,{2**40}\n", r"line 2: hash_ids='1099511627776' must be ids"),
    "too many ids": (TIMED + "0,3,1,1-4\n", r"line 2: hash_ids='1-4' must be .* token \(3\)"),
    "bad JSON": (
        json.dumps(MOONCAKE) + '\n{"timestamp": 1,\n',
        r"line 2: '\{.*' must be a JSON object on one line: Expecting",
    ),
    "a list": (json.dumps(MOONCAKE) + "\n[1]\n", r"line 2: '\[1\].*' must be a JSON object"),
    "deep JSON": (json.dumps(MOONCAKE) + "\n" + "[" * 200_000, r"line 2: .* must be a JSON object"),
    "JSON in CSV": (OURS + '{"a":1}\n', r"line 2: output_tokens is missing"),
    "a JSON array": ("[\n" + json.dumps(MOONCAKE) + "]", r"line 1: columns \['\['\] must include"),
    "not text": (OURS.encode() + b"3,1\n\xff,1\n", r"line 3: b'\\xff,1.*' must be UTF-8 text"),
    "UTF-16": (OURS.encode("utf-16"), r"line 1: .* must be UTF-8 text"),
    "cut gzip": (gzip.compress((OURS + "3,1\n" * 99).encode())[:-9], r"line \d+: Compressed file"),
    "bad gzip": (b"\x1f\x8bnothing of the kind", r"line 1: "),
}
for name, change, message in (
    ("JSON NaN", {"timestamp": math.nan}, r"timestamp=nan must be a number >= 0"),
    ("JSON bool", {"timestamp": True}, r"timestamp=True must be a number >= 0"),
    ("JSON null", {"timestamp": None}, r"timestamp=None must be a number >= 0"),
    ("JSON fraction", {"input_length": 3.5}, r"input_length=3.5 must be an integer >= 1"),
    ("JSON true", {"output_length": True}, r"output_length=True must be an integer >= 1"),
    ("JSON zero", {"output_length": 0}, r"output_length=0 must be an integer >= 1"),
    ("JSON ids", {"hash_ids": [0, "x"]}, r"hash_ids=\[0, 'x'\] must be ids"),
    ("JSON id", {"hash_ids": 3}, r"hash_ids=3 must be ids"),
):
    text = f"{json.dumps(MOONCAKE)}\n{json.dumps(MOONCAKE | change)}\n"
    MALFORMED[name] = (text, f"line 2: {message}")
for key in MOONCAKE:
    row = {name: value for name, value in MOONCAKE.items() if name != key}
    text = f"{json.dumps(MOONCAKE)}\n{json.dumps(row)}\n"
    MALFORMED[f"JSON without {key}"] = (text, f"line 2: {key} (is missing|must be in all rows)")
row = {"prompt_tokens": 3, "output_tokens": 1}
MALFORMED["ids in some rows"] = (
    f"{json.dumps(row)}\n{json.dumps(row | {'hash_ids': '0'})}\n",
    r"line 2: hash_ids must be in all rows or in none",
)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(write, name):
    content, message = MALFORMED[name]
    path = write(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert re.match(rf"path='{path}'(, line \d+: | must hold)", str(caught.value))
    assert len(str(caught.value)) < 600


def test_a_field_of_endless_length(write):
    path = write(TIMED + "0,3,1," + "1 " * csv.field_size_limit())
    with pytest.raises(ValueError, match=r"line 2: field larger than field limit"):
        read_trace(path)


@pytest.mark.parametrize("name", ["max_requests", "divide_by"])
def test_numbers_that_are_not_positive(name):
    with pytest.raises(ValueError, match=rf"{name}=0 must be at least 1"):
        read_trace(TRACE, **{name: 0})


def test_tokens_of_an_id():
    assert find_tokens_per_id([TraceRequest(3, 1)]) is None
    assert find_tokens_per_id(read_trace(TRACE)) == 4
    assert find_tokens_per_id([TraceRequest(7, 1, (3,))]) == 8
    # 30 tokens in 3 blocks: 10 to 14 of them each, and no power of two.
    assert find_tokens_per_id([TraceRequest(30, 1, (0, 1, 2))]) == 10
    with pytest.raises(ValueError, match=r"at least 4 tokens an id, one at most 3 "):
        find_tokens_per_id([TraceRequest(4, 1, (0,)), TraceRequest(4, 1, (1, 2))])
