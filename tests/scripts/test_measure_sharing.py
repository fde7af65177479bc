import random
from pathlib import Path

import pytest

from paged_jax.simulation.lengths import DATASETS, draw_requests
from paged_jax.simulation.traces import TraceRequest, read_trace
from paged_jax_scripts.sharing import (
    count_hit_tokens,
    parallel_saving,
    prefix_table,
    replay_prefixes,
    saving_table,
)

TRACE = Path(__file__).parents[1] / "data" / "prefix_trace.csv"


@pytest.mark.parametrize("num_samples", [2, 3])
def test_saving_of_equal_requests(num_samples):
    # One at a time: 2 full prompt blocks of 4 are shared, and in the step of the prompt its partly
    # filled one too. Every 8th step is looked at, 13 steps a request: all 13 ages are seen alike.
    requests = [TraceRequest(9, 13)] * (8 * 20 + 2)
    saving = parallel_saving(requests, num_samples=num_samples, block_size=4, concurrency=1)
    others = num_samples - 1
    ages = [
        others * (3 if age == 0 else 2) / (num_samples * -(-(9 + age) // 4)) for age in range(13)
    ]
    assert saving == pytest.approx(sum(ages) / 13, rel=0.01)


@pytest.mark.parametrize("name", [*DATASETS])
def test_saving_rises_with_sequences_and_is_near_the_papers(name):
    dataset = DATASETS[name]
    requests = draw_requests(dataset, 300, seed=0)
    savings = [
        100 * parallel_saving(requests, num_samples=n, block_size=16, concurrency=4) for n in (2, 6)
    ]
    tolerance = {"sharegpt": 6, "alpaca": 4}[name]
    assert savings[0] < savings[1]
    assert savings == pytest.approx([dataset.parallel[2], dataset.parallel[6]], abs=tolerance)


def test_too_few_requests():
    with pytest.raises(ValueError, match=r"has 3, it must have many times concurrency=4"):
        parallel_saving([TraceRequest(4, 4)] * 3, num_samples=2, block_size=4, concurrency=4)


def test_hits_by_hand():
    requests = read_trace(TRACE)
    # 8 of ids 0, 1; 11 of 12, the last token is never found; 8 and 0 of id 3's 4; 3 of 4; nothing;
    # 14 of 15 and 15 of 16; 8 of ids 4, 5; nothing, since 1 follows another beginning.
    expected = 8 + 11 + 8 + 3 + 0 + 14 + 15 + 8 + 0
    assert count_hit_tokens(requests, block_size=4) == expected
    stats = replay_prefixes(requests, block_size=4, num_blocks=100)
    assert stats.hit_tokens == expected
    assert stats.query_tokens == sum(request.num_prompt for request in requests)
    assert stats.evictions == 0


def test_hits_of_random_trees():
    rng = random.Random(0)
    for _ in range(30):
        paths: list[tuple[int, ...]] = [()]
        requests = []
        for _ in range(40):
            for _ in range(rng.randrange(4)):
                paths.append((*rng.choice(paths), len(paths)))
            if path := rng.choice(paths):
                num_prompt = 4 * len(path) - rng.choice([0, 0, 1, 2, 3])
                requests.append(TraceRequest(num_prompt, 1, path))
        num_blocks = 1 + sum(len(request.prefix_ids) for request in requests)
        stats = replay_prefixes(requests, block_size=4, num_blocks=num_blocks)
        assert stats.hit_tokens == count_hit_tokens(requests, block_size=4) > 0
        longest = max(len(request.prefix_ids) for request in requests)
        bounded = replay_prefixes(requests, block_size=4, num_blocks=longest + 1)
        assert bounded.hit_tokens < stats.hit_tokens
        assert bounded.evictions > 0


@pytest.mark.parametrize("num_blocks", [100, 3])
def test_prompts_that_cannot_be_replayed(num_blocks):
    request = TraceRequest(9, 1, (0, 1) if num_blocks == 100 else (0, 1, 2))
    with pytest.raises(ValueError, match=r"requests\[0\] has \d ids; it must have one for each"):
        replay_prefixes([request], block_size=4, num_blocks=num_blocks)


def test_wrong_ids_are_noticed():
    # The same id after two beginnings is not the same block.
    requests = [TraceRequest(12, 1, (0, 1, 2)), TraceRequest(12, 1, (3, 2, 1))]
    requests.append(TraceRequest(12, 1, (3, 1, 2)))
    with pytest.raises(RuntimeError, match=r"\d+ tokens hit, \d+ counted from the ids"):
        prefix_table(requests, block_size=4, capacities=[])


def test_papers_figures_stand_beside_ours():
    table = saving_table(DATASETS["alpaca"], {2: 0.07, 3: 0.08})
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["2", "3"]
    assert cells[1] == ["7.0%", "8.0%"]
    assert cells[2] == ["6.1%", "-"]
    assert cells[3] == ["+0.9 points", "-"]
    assert cells[4] == ["37.6%", "-"]
    assert len(saving_table(None, {2: 0.07}).columns) == 2


def test_program(run_program):
    def run(*args):
        return run_program("measure_sharing", *args, is_toy=False)

    drawn = run("--num_requests=120", "--concurrency=4", "--samples=2")
    assert drawn.returncode == 0, drawn.stderr
    assert "sharegpt (lengths drawn)" in drawn.stdout
    assert "37.6%" in drawn.stdout
    prefix = run("--what=prefix", "--block_size=4", "--capacities=5,8", f"--trace={TRACE}")
    assert prefix.returncode == 0, prefix.stderr
    assert "counted from the ids alone: 67" in prefix.stdout
    assert "endless" in prefix.stdout
    missing = run("--what=prefix")
    assert missing.returncode == 2
    assert "trace=[] must name a file" in missing.stderr
