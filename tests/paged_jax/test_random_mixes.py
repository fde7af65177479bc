"""Everything at once: each request yields what it would alone, where nothing is shared or lost.

Greedy, sampled, parallel and beam requests with common beginnings, in pools that are too small,
with either kind of preemption, drafts, and cancels at random steps. "Alone" is an engine without
prefix cache and drafts that has one request at a time, so that its pool never fills. Equality is
exact: the model is an integer hash of all that it reads back through the pool.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import drive, fill_pool, greedy, make_engine

from paged_jax import Engine, NgramSpeculation, RequestOutput, SamplingParams

# Outputs repeat themselves, so that there are drafts; and every request has biases and as many stop
# tokens, so that all mixes run the same few programs.
REPETITIVE = {5: 9.0, 6: 9.0, 7: 8.5}
NUM_STOPS = 5
NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE = 12, 21, 4

SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap"},
    "swap to a tiny host pool": {"preemption": "swap", "num_host_blocks": 6},
    "auto, drafts": {"preemption": "auto", "speculation": NgramSpeculation(min_ngram_len=1)},
    "recompute, chunks, drafts": {
        "preemption": "recompute",
        "prefill_chunk_len": 5,
        "speculation": NgramSpeculation(min_ngram_len=1),
    },
    "swap, zeroed, by priority": {
        "preemption": "swap",
        "zero_on_free": True,
        "scheduling": "priority",
    },
    # 128 blocks hold one group of six at its longest, and some more.
    **{
        name: {"reservation": name, "prefix_cache": False, "num_blocks": 129, **options}
        for name, options in {
            "orca_max": {"zero_on_free": True},
            "orca_pow2": {"prefill_chunk_len": 5},
            "orca_oracle": {"speculation": NgramSpeculation(min_ngram_len=1)},
        }.items()
    },
}


@dataclasses.dataclass(frozen=True)
class Item:
    """A request of a mix, when it comes, and when it is cancelled."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    cancel: int | None
    salt: str | None
    priority: int


@functools.cache
def lonely_engine() -> Engine:
    return make_engine(max_num_seqs=NUM_SEQS, num_blocks=NUM_BLOCKS, prefix_cache=False)


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    engine = lonely_engine()
    request_id = engine.add_request(list(prompt), params)
    output = drive(engine)[request_id][-1]
    assert output.num_preemptions == 0
    return output


@functools.cache
def crowded_engine(name: str) -> Engine:
    settings = {"num_blocks": NUM_BLOCKS, **SETTINGS[name]}
    engine = make_engine(max_num_seqs=NUM_SEQS, **settings)
    fill_pool(engine, np.nan)
    return engine


def random_params(rng: random.Random) -> SamplingParams:
    common: dict[str, Any] = {
        "max_tokens": rng.choice([1, 5, 9, 14]),
        "logit_bias": REPETITIVE,
        "stop_token_ids": rng.sample(range(8, hash_model.VOCAB_SIZE), NUM_STOPS),
    }
    kind = rng.choice(["greedy", "sampled", "parallel", "beam"])
    if kind == "greedy":
        return greedy(**common)
    if kind == "beam":
        width = rng.randint(2, 6)
        return SamplingParams(
            beam_width=width,
            n=rng.randint(1, width),
            length_penalty=rng.choice([0.0, 1.0, 1.5]),
            early_stopping=rng.choice([False, True, "never"]),
            **common,
        )
    n = rng.randint(2, 6) if kind == "parallel" else 1
    return SamplingParams(temperature=1.0, seed=rng.randrange(2**64), n=n, **common)


def random_mix(seed: int) -> list[Item]:
    rng = random.Random(seed)
    # Two beginnings, each shared by some; both end inside a block.
    beginnings = [[rng.randrange(40) for _ in range(length)] for length in (13, 22)]
    items = []
    for _ in range(rng.randint(6, 10)):
        rest = [rng.randrange(hash_model.VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        beginning = rng.choice([[], *beginnings])
        prompt = tuple(beginning[: rng.randint(9, 22)] + rest)
        params = random_params(rng)
        # Room for all of its sequences to their end, so that nothing is capped.
        shared = len(prompt) // BLOCK_SIZE
        own = -(-(len(prompt) + params.max_tokens) // BLOCK_SIZE) - shared
        while shared + own * params.num_samples >= NUM_BLOCKS:
            params = dataclasses.replace(params, n=1, max_tokens=4, **beam_width_of(params, 2))
            own = -(-(len(prompt) + 4) // BLOCK_SIZE) - shared
        cancel = rng.randint(0, 25) if rng.random() < 0.25 else None
        salt = rng.choice([None, None, None, "one"])
        items.append(Item(prompt, params, rng.randint(0, 6), cancel, salt, rng.randint(0, 2)))
    return items


def beam_width_of(params: SamplingParams, width: int) -> dict[str, int]:
    return {} if params.beam_width is None else {"beam_width": width}


def check(output: RequestOutput, item: Item) -> None:
    expected = alone(item.prompt, item.params)
    is_search = item.params.beam_width is not None
    if is_search and output.outputs[-1].finish_reason == "cancelled":
        return
    assert len(output.outputs) == len(expected.outputs)
    for mine, theirs in zip(output.outputs, expected.outputs, strict=True):
        if mine.finish_reason == "cancelled":
            assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            continue
        assert mine.token_ids == theirs.token_ids
        assert (mine.finish_reason, mine.stop_reason, mine.index) == (
            theirs.finish_reason,
            theirs.stop_reason,
            theirs.index,
        )
        if theirs.score is not None:
            assert mine.score == pytest.approx(theirs.score, abs=1e-4)


def run_mix(name: str, seed: int) -> Engine:
    engine, items = crowded_engine(name), random_mix(seed)
    by_priority = engine.config.scheduling == "priority"
    numbers: dict[str, int] = {}

    def act(index: int) -> bool:
        for number, item in enumerate(items):
            if item.arrival == index:
                options = {"priority": item.priority} if by_priority else {}
                request_id = engine.add_request(
                    list(item.prompt), item.params, cache_salt=item.salt, **options
                )
                numbers[request_id] = number
        for request_id, number in numbers.items():
            if items[number].cancel == index:
                engine.cancel(request_id)
        return index <= 9

    outputs = drive(engine, before_step=act)
    assert len(outputs) == len(items)
    for request_id, number in numbers.items():
        check(outputs[request_id][-1], items[number])
    return engine


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("recompute", marks=pytest.mark.long),
        "auto, drafts",
        "swap, zeroed, by priority",
    ],
)
def test_each_request_yields_what_it_would_alone(name):
    for seed in range(4):
        engine = run_mix(name, seed)
    print(engine.stats)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.prefix_cache_hits > 0
    assert engine.stats.num_copied_blocks > 0


@pytest.mark.parametrize(
    "name", [pytest.param("orca_max", marks=pytest.mark.long), "orca_pow2", "orca_oracle"]
)
def test_contiguous_regions_change_nothing_but_where_tokens_are(name):
    for seed in range(2):
        engine = run_mix(name, seed)
    assert engine.stats.num_preemptions == engine.stats.prefix_cache_hits == 0
    assert engine.stats.num_copied_blocks > 0


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_many_mixes(name, part):
    for seed in range(1000 * (part + 1), 1000 * (part + 1) + 60):
        run_mix(name, seed)
