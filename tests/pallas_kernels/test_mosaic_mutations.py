"""Which bugs in the Mosaic decode kernel the interpreter sees, and by what.

| bug | seen by |
|---|---|
| sound | nothing |
| no wait for a tile | race |
| no wait for a free slot | race |
| slot released before its last use | race |
| slot never released | deadlock |
| one arrival too few | barrier |
| one arrival too many | deadlock |
| wrong slot | deadlock |
| no wait for the queries | race |
| no wait for a free query buffer | race |
| query buffer never released | deadlock |
| no commit of p before the tensor core reads it | nothing |
| no commit before the output's copy | race |
| unreadable V not zeroed | numbers |
| one key too many | numbers |
| window one key too wide | numbers |
| columns of a token taken for the next | numbers |
| blocks of a tile in the wrong order | numbers |
| another head's rows | numbers |
| old sums not decayed | numbers |
| wrong weight of a partial result | numbers |
| last item merged twice | numbers |
| no fence between threads' reads and the next copy | race |
| ids of blocks not clamped | nothing |
| unused entries of the table read | bounds |

Races, barrier errors and deadlocks may stand for each other: which of them a bug shows first is a
matter of the threads' timing. `nothing` is honest: the interpreter has the granularity of a
warpgroup, so it sees neither a missing fence between registers' stores and the tensor core, nor a
clamp that a checked table never needs. What those do is left to a GPU (`scripts/gpu_check.py`).
"""

import pytest
from suites.mutations import BUGS, changed_source, seen_by

# One of each kind that is seen without waiting for a deadlock.
SAMPLE = ("no wait for a free slot", "one arrival too few", "unreadable V not zeroed")

# A bug of synchronisation is seen by the first of these that a run of the threads leads to.
TIMING = {"race", "barrier", "deadlock"}


def is_as_listed(seen: str, name: str) -> bool:
    listed = BUGS[name].seen_by
    return seen == listed or {seen, listed} <= TIMING


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_bugs_are_seen(name):
    assert is_as_listed(seen_by(name), name)


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_every_bug(name):
    seen = seen_by(name)
    print(f"| {name} | {seen} |")
    assert is_as_listed(seen, name)


def test_every_bug_changes_the_kernel():
    for bug in BUGS.values():
        changed_source(bug)  # asserts that the text is there
        assert bug.old != bug.new or bug is BUGS["sound"]


def test_the_table_above_is_the_suite_s():
    rows = [line.strip("| ").split(" | ") for line in __doc__.splitlines() if line[:2] == "| "]
    assert rows[1:] == [[name, bug.seen_by] for name, bug in BUGS.items()]
