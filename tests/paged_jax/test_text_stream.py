import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.text_stream import TextStream


def run(pieces, **options):
    """Every delta, and the stream after finish()."""
    stream = TextStream(list(pieces).__getitem__, **options)
    deltas = []
    for i in range(len(pieces)):
        deltas.append(stream.push(i))
        if stream.stopped is not None:
            break
    deltas.append(stream.finish())
    assert "".join(deltas) == stream.text
    return deltas, stream


TOKENS = [b"ab", b"cd", b"ef"]


@pytest.mark.parametrize(
    ("stop", "include", "text", "stopped"),
    [
        (["bcd"], False, "a", "bcd"),
        (["bcd"], True, "abcd", "bcd"),
        (["f"], False, "abcde", "f"),
        (["f"], True, "abcdef", "f"),
        (["zz"], False, "abcdef", None),
        (["zz"], True, "abcdef", None),
        (["cd", "bc"], False, "a", "bc"),
        (["cd", "bc"], True, "abc", "bc"),
        (["fg"], False, "abcdef", None),
        ([], False, "abcdef", None),
    ],
)
def test_b75_stop_strings_across_tokens(stop, include, text, stopped):
    _, stream = run(TOKENS, stop=stop, include_stop=include)
    assert (stream.text, stream.stopped) == (text, stopped)


def test_b75_held_text_is_flushed_at_the_end():
    deltas, stream = run(TOKENS, stop=["efg"])
    assert deltas == ["ab", "cd", "", "ef"]
    assert stream.stopped is None
    assert stream.finish() == ""


def test_the_stop_that_is_complete_first_ends_the_text():
    # 'bc' is complete before 'abcd', although it starts later; what is before it is given out.
    assert run([b"abcd"], stop=["abcd", "bc"])[1].text == "a"
    # Complete at the same character: the longest, so the earliest start.
    assert run([b"xabc"], stop=["c", "abc", "bc"])[1].text == "x"
    # A failed longer match must not hide a shorter one inside it.
    assert run([b"aab", b"aac"], stop=["aabaab", "aac"])[1].text == "aab"


def test_characters_are_given_out_once_complete():
    pieces = [bytes([byte]) for byte in "a€😀é".encode()]
    deltas, _ = run(pieces)
    assert deltas == ["a", "", "", "€", "", "", "", "😀", "", "é", ""]


def test_bytes_that_are_no_text_become_replacement_characters():
    assert run([b"\xe2\x82"])[0] == ["", "\ufffd"]
    assert run([b"\xe2", b"a"])[0] == ["", "\ufffda", ""]
    assert run([b"\xff"])[0] == ["\ufffd", ""]
    assert run([b"ok\xe2"], stop=["\ufffd"])[1].stopped == "\ufffd"


def test_tokens_after_a_stop_are_ignored():
    stream = TextStream(TOKENS.__getitem__, stop=["b"])
    assert [stream.push(0), stream.push(1), stream.finish()] == ["a", "", ""]
    assert stream.text == "a"


def test_refuses_empty_stops_and_pushes_after_the_end():
    for stop in ("ab", [""], ["a", ""]):
        with pytest.raises(ValueError, match="stop="):
            TextStream(TOKENS.__getitem__, stop=stop)
    stream = TextStream(TOKENS.__getitem__)
    stream.finish()
    with pytest.raises(RuntimeError, match=r"token 1 pushed after finish"):
        stream.push(1)


def cut_by_search(text, stops, include):
    """Where a whole text ends, found by trying every end and every stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(alphabet="ab€\ufffd", min_size=1, max_size=5), max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    data=st.lists(st.sampled_from(["a", "b", "€", "é"]), max_size=30),
    noise=st.lists(st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=2)), max_size=2),
    cuts=st.lists(st.integers(0, 70), max_size=20),
    stops=STOPS,
    include=st.booleans(),
)
def test_deltas_are_the_final_text_whatever_the_tokens(data, noise, cuts, stops, include):
    raw = "".join(data).encode()
    for place, junk in noise:
        raw = raw[:place] + junk + raw[place:]
    bounds = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    _, stream = run(pieces, stop=stops, include_stop=include)
    text, stopped = cut_by_search(raw.decode("utf-8", errors="replace"), stops, include)
    assert (stream.text, stream.stopped) == (text, stopped)


def test_no_more_is_held_than_may_begin_a_stop():
    stream = TextStream([b"x", b"<", b"|", b"e", b"<"].__getitem__, stop=["<|end|>"])
    assert [stream.push(i) for i in range(5)] == ["x", "", "", "", "<|e"]
    assert stream.finish() == "<"


def test_a_long_stop_string_costs_no_more_a_token():
    stop = "a" * 5000 + "b"
    deltas, stream = run([b"a" * 20_000, b"a" * 20_000], stop=[stop])
    assert stream.stopped is None
    assert len(deltas[-1]) == 5000


def test_stop_strings_count_only_after_min_tokens():
    stream = TextStream([b"ab", b"c"].__getitem__, stop=("ab", "ca"), min_tokens=2)
    deltas = [stream.push(token) for token in (0, 1)]  # "ab" is too early to stop
    assert deltas == ["ab", "c"]
    assert stream.push(0) == ""  # the "c" of "ca" came too early as well; "ab" counts now
    assert stream.stopped == "ab"
    assert stream.text == "abc"
