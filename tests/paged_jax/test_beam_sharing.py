"""What the beams of a search share, copy and free, seen from the engine (paper Fig. 9)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from suites.engine_runs import drive, fill_pool, make_engine, random_prompts
from suites.small_models import transition_model

from paged_jax import Engine, SamplingParams


def tables_of(engine: Engine) -> list[list[int]]:
    manager = engine.block_manager
    return [manager.table_array(one.seq_id).tolist() for one in engine.scheduler.running]


def outputs_and_tables(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    running = engine.scheduler.running
    return {
        tuple(one.output_token_ids): table
        for one, table in zip(running, tables_of(engine), strict=True)
    }


def count_references(engine: Engine) -> Counter[int]:
    """By block; the manager's own counts must agree, and all other blocks be free."""
    counts = Counter(block for table in tables_of(engine) for block in table)
    manager = engine.block_manager
    assert all(manager.ref_count(block) == counts[block] for block in range(1, engine.num_blocks))
    return counts


def watch(engine: Engine) -> dict[str, int]:
    """Check every step of one search; returns counters."""
    update, execute = engine.scheduler.update, engine.executor.execute
    counted = {"forks": 0, "losers": 0, "copies": 0}

    def checked_update(plan, *values, **options):
        before = outputs_and_tables(engine)
        engine.block_manager.begin_step()  # no copy of this step reads a block any more
        result = update(plan, *values, **options)
        after = outputs_and_tables(engine)
        parents = Counter(output[:-1] for output in after)
        assert all(table == before[output[:-1]] for output, table in after.items() if output)
        count_references(engine)
        counted["forks"] += len(after) - len(parents)
        counted["losers"] += len(before.keys() - parents.keys()) if after else 0
        return result

    def checked_execute(plan):
        assert len(plan.copies) <= len(plan.decode_rows)
        assert len({copy.dst for copy in plan.copies}) == len(plan.copies)
        counted["copies"] += len(plan.copies)
        return execute(plan)

    engine.scheduler.update, engine.executor.execute = checked_update, checked_execute
    return counted


@pytest.mark.parametrize("width", [2, 6])
def test_children_share_all_of_their_parent_and_losers_free_theirs(width):
    engine = make_engine(max_num_seqs=6, num_blocks=40)
    fill_pool(engine, np.nan)
    counted = watch(engine)
    ends = range(0, 251, 5)
    for seed, prompt in enumerate(random_prompts(width, [5, 9])):
        params = SamplingParams(
            beam_width=width,
            max_tokens=14,
            stop_token_ids=ends,
            early_stopping=("never", False)[seed],
        )
        engine.add_request(prompt, params)
        drive(engine)
    assert counted["forks"] > width
    assert counted["losers"] > width
    assert counted["copies"] > width
    assert engine.stats.num_copied_blocks == counted["copies"]


def test_paper_figure_9():
    """Blocks of one token. Candidates 1 to 3 share two blocks after the prompt's, candidate 0 has
    its own three; then all four beams come from candidates 2 and 3."""
    low, high = -20.0, 10.0
    logits = np.full((4, 6, 6), low)  # [position, token, next token]
    logits[0, 0, [1, 2, 3, 4]] = 5.0, 4.9, 0.0, 0.0
    logits[1, 1, 1] = logits[1, 2, 2] = high
    logits[1, [3, 4]] = 0.0
    logits[2, 1, [1, 2, 3]] = high
    logits[2, 2, 4] = high
    logits[3] = 0.0
    logits[3, 2, [1, 2]] = logits[3, 3, [1, 2]] = high
    engine = make_engine(transition_model(logits), block_size=1, num_blocks=30)
    engine.add_request([0], SamplingParams(beam_width=4, max_tokens=5))
    counted = watch(engine)
    update, seen = engine.scheduler.update, []

    def look(plan, *values, **options):
        outputs = outputs_and_tables(engine)
        if {len(output) for output in outputs} == {3}:
            seen.append((outputs, count_references(engine)))
        result = update(plan, *values, **options)
        if seen and len(seen) == 1:
            seen.append((outputs_and_tables(engine), count_references(engine)))
        return result

    engine.scheduler.update = look
    drive(engine)
    (before, counts), (after, next_counts) = seen
    assert list(before) == [(2, 2, 4), (1, 1, 1), (1, 1, 2), (1, 1, 3)]
    prompt, *_, unshared = before[1, 1, 1]
    assert before[1, 1, 2][:3] == before[1, 1, 3][:3] == before[1, 1, 1][:3]
    assert sorted(counts.values()) == [1] * 6 + [3, 3, 4]
    assert list(after) == [(1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 3, 1), (1, 1, 3, 2)]
    freed = counts.keys() - next_counts.keys()
    assert freed == {*before[2, 2, 4]} - {prompt} | {unshared}
    assert [next_counts[block] for block in before[1, 1, 2]] == [4, 4, 4, 2]
    assert next_counts[before[1, 1, 3][3]] == 2
    assert counted["copies"] == 0


def test_two_children_of_one_beam_copy_its_half_full_block_once():
    """Three beams, blocks of four: the last of a block's writers keeps it."""
    engine = make_engine(max_num_seqs=6, num_blocks=40)
    engine.add_request(random_prompts(3, [5])[0], SamplingParams(beam_width=4, max_tokens=3))
    counted = watch(engine)
    drive(engine)
    assert engine.stats.num_copied_blocks == counted["copies"]
    assert counted["copies"] >= 3  # four beams leave the prompt's half-full block
