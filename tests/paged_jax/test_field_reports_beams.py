"""Field reports of the kind "beam search", at the engine (tests/data/field_reports.json)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from suites import dense_beam
from suites.engine_runs import drive, make_engine, random_prompts, run_all
from suites.small_models import transition_model

from paged_jax import Engine, KVPool, SamplingParams
from paged_jax.scheduling.beam import Candidate

# Next-token logits after each of five tokens; 4 ends.
TABLE = np.random.default_rng(77).normal(0, 2, (1, 5, 5)).astype(np.float32)
TABLE[..., 4] += 2
LOGPROBS = (TABLE - np.log(np.exp(TABLE).sum(-1, keepdims=True)))[0].astype(np.float64)
END, MAX_TOKENS, PROMPT = 4, 6, [0]


def sum_of(tokens: tuple[int, ...]) -> float:
    return sum(LOGPROBS[a, b] for a, b in itertools.pairwise([*PROMPT, *tokens]))


def brute_force(max_tokens: int) -> dict[tuple[int, ...], float]:
    """All whole outputs and their sums."""
    found = {}
    for tokens in itertools.product(range(5), repeat=max_tokens):
        cut = tokens.index(END) + 1 if END in tokens else max_tokens
        found[tokens[:cut]] = sum_of(tokens[:cut])
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(transition_model(TABLE), max_num_seqs=30, num_blocks=200)


def search(engine: Engine, width: int, max_tokens: int = MAX_TOKENS, **fields):
    fields = {"stop_token_ids": [END], "n": width, "max_tokens": max_tokens, **fields}
    (output,) = run_all(engine, [PROMPT], SamplingParams(beam_width=width, **fields))
    return output.outputs


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_b77_more_candidates_than_tokens_in_the_vocabulary(engine, width):
    """Each row yields width x 2 candidates, or all five; the reference is a dense search."""
    found = search(engine, width)
    asked = dense_beam.Search(width=width, max_tokens=MAX_TOKENS, ends=(END,))
    expected = dense_beam.run(
        asked, lambda outputs: np.stack([LOGPROBS[[*PROMPT, *one][-1]] for one in outputs])
    )[-1].hypotheses
    assert [one.token_ids for one in found] == [one.tokens for one in expected]
    assert len({one.token_ids for one in found}) == width
    everything = brute_force(MAX_TOKENS)
    for one in found:
        assert one.cumulative_logprob == pytest.approx(everything[one.token_ids], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_b77_a_search_wide_enough_finds_what_brute_force_finds(engine, max_tokens):
    everything = brute_force(max_tokens)
    width = min(len(everything), 25)
    found = search(engine, width, max_tokens, length_penalty=0.0, early_stopping="never")
    # Sums tie where tokens only change places, so sums are compared.
    np.testing.assert_allclose(
        [everything[one.token_ids] for one in found],
        sorted(everything.values(), reverse=True)[:width],
        atol=1e-4,
    )
    assert len({one.token_ids for one in found}) == width


@pytest.mark.parametrize("length_penalty", [0, 0.5, 1, 2, -1])
def test_b79_the_end_token_counts_in_sum_and_length(engine, length_penalty):
    found = search(engine, 4, length_penalty=length_penalty, early_stopping=True)
    assert "stop" in {one.finish_reason for one in found}
    for one in found:
        assert (one.finish_reason == "stop") == (one.token_ids[-1] == END)
        expected = sum_of(one.token_ids) / len(one.token_ids) ** length_penalty
        assert one.score == pytest.approx(expected, abs=1e-4)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


def test_b80_beams_0_1_2_become_2_2_0():
    """Each beam's keys and values are constants of their own, by layer, K or V, and beam."""
    engine = make_engine(max_num_seqs=6, num_blocks=40)
    (prompt,) = random_prompts(80, [4])
    request_id = engine.add_request(prompt, SamplingParams(beam_width=3, n=3, max_tokens=9))
    manager = engine.block_manager
    while not _stand_alone(engine, num_tokens=6):
        engine.step()
    beams = list(engine.scheduler.running)
    lost = manager.table_array(beams[1].seq_id)[-1]
    outputs = [list(beam.output_token_ids) for beam in beams]
    score = beams[0].cumulative_logprob - 1
    candidates = [Candidate(score - i, parent, 7 + i) for i, parent in enumerate((2, 2, 0))]
    update = engine.scheduler.update
    request = beams[0].request
    engine.scheduler.update = lambda plan, tokens, *_, **__: update(
        plan, tokens, {request: candidates}
    )
    _fill(engine, [manager.table_array(beam.seq_id)[1] for beam in beams])
    engine._collect()
    manager.begin_step()  # what the step before gave up is free now
    assert manager.ref_count(lost) == 0
    engine.scheduler.update = update
    children = list(engine.scheduler.running)
    expected = [outputs[parent] + [7 + i] for i, parent in enumerate((2, 2, 0))]
    assert [child.output_token_ids for child in children] == expected
    copies = engine.stats.num_copied_blocks
    num_held = manager.num_tokens(children[0].seq_id)
    engine.step()
    assert engine.stats.num_copied_blocks == copies + 1
    last = [manager.table_array(child.seq_id)[-1] for child in children]
    assert len(set(last)) == 3
    blocks = np.asarray(engine.executor.pool.blocks)
    filled = num_held % engine.config.block_size
    for block, parent in zip(last, (2, 2, 0), strict=True):
        for layer, side in itertools.product(range(blocks.shape[0]), range(2)):
            kept = blocks[layer, block, side][:, :filled]
            assert (kept == _constant(layer, side, parent)).all()
    engine.cancel(request_id)
    drive(engine)


def _stand_alone(engine: Engine, *, num_tokens: int) -> bool:
    """Whether three beams each hold a last block of their own, filled up to ``num_tokens``."""
    manager, beams = engine.block_manager, engine.scheduler.running
    tables = [manager.table_array(beam.seq_id).tolist() for beam in beams]
    alone = len({table[-1] for table in tables}) == 3
    return alone and all(manager.num_tokens(beam.seq_id) >= num_tokens for beam in beams)


def _constant(layer: int, side: int, beam: int) -> float:
    return 100.0 * layer + 10.0 * side + beam + 1


def _fill(engine: Engine, blocks: list[int]) -> None:
    pool = np.array(engine.executor.pool.blocks)
    for beam, block in enumerate(blocks):
        for layer, side in itertools.product(range(pool.shape[0]), range(2)):
            pool[layer, block, side] = _constant(layer, side, beam)
    engine.executor.pool = KVPool(np.array(pool))
