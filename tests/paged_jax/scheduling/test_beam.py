"""Which beams live on, which have ended, and when a search is over; by hand."""

import pytest
from suites.host_simulation import make_request

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.beam import BeamSearch, Candidate, most_candidates
from paged_jax.scheduling.sequence import Sequence

END = 9


def start(width: int, **params) -> tuple[BeamSearch, BlockManager]:
    request = make_request("r", 5, 10, beam_width=width, stop_token_ids=[END], **params)
    sequences = tuple(
        Sequence(request, seq_id=i, max_tokens=10, sample_index=i) for i in range(width)
    )
    manager = BlockManager(num_blocks=20, block_size=4)
    manager.allocate(0, num_tokens=5)
    sequences[0].num_computed = 5
    manager.begin_step()
    return BeamSearch(sequences), manager


def tokens_of(search: BeamSearch) -> list[list[int]]:
    return [beam.output_token_ids for beam in search.beams]


def test_an_end_token_counts_among_the_best_width_only():
    search, manager = start(2)
    assert most_candidates(search.beams[0].request) == 4
    found = [Candidate(-1, 0, 3), Candidate(-2, 0, 4), Candidate(-3, 0, END)]
    assert not search.advance(found, manager)
    assert tokens_of(search) == [[3], [4]]
    assert search.hypotheses == []
    found = [Candidate(-2, 1, END), Candidate(-3, 0, 7), Candidate(-4, 0, 8)]
    assert not search.advance(found, manager)
    assert tokens_of(search) == [[3, 7], [3, 8]]
    (ended,) = search.hypotheses
    assert (ended.token_ids, ended.score, ended.stop_reason) == ((4, END), -1.0, END)
    manager.check_integrity()


def test_the_first_child_keeps_the_table_and_others_fork_it():
    search, manager = start(3)
    search.advance([Candidate(-1, 0, 1), Candidate(-2, 0, 2), Candidate(-3, 0, 3)], manager)
    first, second, third = search.beams
    assert manager.ref_count(int(manager.table_array(first.seq_id)[0])) == 3
    search.advance([Candidate(-4, 2, 5), Candidate(-5, 2, 6), Candidate(-6, 0, 7)], manager)
    assert search.beams == [third, second, first]
    assert tokens_of(search) == [[3, 5], [3, 6], [1, 7]]
    search.advance([Candidate(-7, 1, 5)], manager)
    assert search.beams == [second]
    assert manager.num_sequences == 1
    assert (first.output_token_ids, first.num_computed) == ([], 0)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "is_over"),
    [
        (True, 1.0, -1.0, True),
        (False, 1.0, -2.0, True),  # -2 / 2 does not beat -1
        (False, 1.0, -1.9, False),
        ("never", 1.0, -9.0, False),  # -9 / 10 could
        ("never", 1.0, -10.0, True),
        ("never", 0.0, -2.0, True),  # sums: -2 does not beat -2
        ("never", -1.0, -1.1, False),  # -1.1 * 2 beats -2 * 2
    ],
)
def test_when_a_search_with_enough_hypotheses_is_over(
    early_stopping, length_penalty, best, is_over
):
    search, manager = start(1, early_stopping=early_stopping, length_penalty=length_penalty)
    assert not search.advance([Candidate(-0.5, 0, 1)], manager)
    found = [Candidate(-2.0, 0, END), Candidate(best, 0, 2)]
    assert search.advance(found, manager) == is_over


def test_what_is_banned_never_lives_on():
    search, manager = start(3)
    minus = -float("inf")
    assert not search.advance([Candidate(-1, 0, 4), Candidate(minus, 0, 1)], manager)
    assert tokens_of(search) == [[4]]
    assert search.advance([Candidate(float("nan"), 0, 1)], manager)
    (only,) = search.hypotheses
    assert (only.token_ids, only.finish_reason) == ((4,), "length")
