"""Drafts by prompt lookup, against a search of the whole text."""

from __future__ import annotations

import random
import time

import pytest
from suites.host_simulation import make_request

from paged_jax.config import NgramSpeculation
from paged_jax.scheduling.ngram import NgramDrafter, NgramIndex
from paged_jax.scheduling.sequence import Sequence


def by_search(tokens: list[int], *, min_len: int, max_len: int, limit: int) -> list[int]:
    """The longest ending's most recent earlier occurrence, and what followed, periodically."""
    for n in range(max_len, min_len - 1, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[len(tokens) - n :]:
                followed = tokens[begin + n :]
                return [followed[i % len(followed)] for i in range(limit)]
    return []


@pytest.mark.parametrize(("min_len", "max_len"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_it_finds_what_a_search_finds(min_len, max_len):
    rng = random.Random(max_len)
    num_found = 0
    for _ in range(40):
        index, tokens = NgramIndex(min_len=min_len, max_len=max_len), []
        for _ in range(25):
            new = rng.choices(range(4), k=rng.randint(0, 4))
            tokens += new
            index.extend(new)
            limit = rng.randint(1, 7)
            found = index.continuation(limit=limit)
            lens = {"min_len": min_len, "max_len": max_len}
            assert found == by_search(tokens, **lens, limit=limit)
            num_found += bool(found)
        assert index.num_tokens == len(tokens)
    assert 100 < num_found < 1000


def test_a_text_that_repeats_goes_on_repeating():
    index = NgramIndex(min_len=2, max_len=3)
    index.extend([9, 8, 5, 5, 5])
    assert index.continuation(limit=4) == [5, 5, 5, 5]
    index.extend([1, 2, 1, 2, 1])
    assert index.continuation(limit=5) == [2, 1, 2, 1, 2]


def test_the_drafter_follows_each_sequence_and_forgets_it():
    drafter = NgramDrafter(NgramSpeculation(num_draft_tokens=3, min_ngram_len=2, max_ngram_len=2))
    one, other = (
        Sequence(make_request(name, prompt), seq_id=seq_id, max_tokens=9)
        for seq_id, (name, prompt) in enumerate([("a", [1, 2, 3, 4, 1]), ("b", [1, 2, 9, 9, 1])])
    )
    assert drafter.propose(one, limit=9) == []
    one.output_token_ids += [2]
    other.output_token_ids += [2]
    assert drafter.propose(one, limit=9) == [3, 4, 1]
    assert drafter.propose(other, limit=2) == [9, 9]
    one.output_token_ids += [7, 1, 2]
    assert drafter.propose(one, limit=9) == [7, 1, 2]
    drafter.forget(one)
    drafter.forget(one)
    assert drafter.propose(one, limit=1) == [7]


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    index = NgramIndex(min_len=2, max_len=4)
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        for token in random.Random(0).choices(range(50), k=20_000):
            index.extend([token])
            index.continuation(limit=4)
        seconds.append(time.process_time() - begin)
    assert min(seconds[-2:]) < 4 * max(seconds[0], 0.01)
