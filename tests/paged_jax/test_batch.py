"""Packing rows for the device, and unpacking them there."""

import numpy as np
import pytest
from suites.engine_runs import make_engine, random_prompts

from paged_jax import SamplingParams
from paged_jax.batch import (
    BatchLayout,
    BatchPacker,
    StepInputs,
    banned_ids,
    biases_of,
    padded_rows,
    row_buckets,
    unpack,
)
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.sampling.noise import base_key
from paged_jax.scheduling.plan import PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence

SEEDS = {0: 7, 1: 2**64 - 1}
TABLES = {0: [3, 1], 1: [5, 2, 9]}
PARAMS = [
    SamplingParams(temperature=0.5, top_k=2**40, top_p=0.25, min_p=0.125, logit_bias={4: -3.5}),
    SamplingParams(
        temperature=0, top_k=-1, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=0.5
    ),
]


def make_sequence(index: int, prompt: list[int], *, slot: int, output: tuple = ()) -> Sequence:
    request = Request(f"r{index}", prompt, PARAMS[index], eos_token_ids=())
    sequence = Sequence(request, seq_id=index, max_tokens=8)
    sequence.state_slot = slot
    sequence.output_token_ids += output
    return sequence


def packer() -> BatchPacker:
    return BatchPacker(
        num_slots=4,
        table_width=3,
        table_of=lambda seq_id: np.array(TABLES[seq_id], np.int32),
        seed_of=lambda sequence: SEEDS[sequence.seq_id],
    )


def layout(**fields) -> BatchLayout:
    flags = SamplerFlags(greedy_only=False, penalties=True, bias_width=16)
    defaults = {"num_rows": 3, "num_new": 4, "table_width": 3, "flags": flags}
    defaults |= {"is_decode": False, "vocab_size": 9}
    return BatchLayout(**{**defaults, **fields})


def check_constants(inputs: StepInputs) -> None:
    """Sampling parameters, keys and tables of two rows and one of padding."""
    sampler = inputs.sampler
    np.testing.assert_array_equal(sampler.temperature, np.float32([0.5, 0, 0]))
    np.testing.assert_array_equal(sampler.top_k, [2**31 - 1, 0, 0])
    np.testing.assert_array_equal(sampler.top_p, np.float32([0.25, 1, 0]))
    np.testing.assert_array_equal(sampler.min_p, np.float32([0.125, 0, 0]))
    np.testing.assert_array_equal(sampler.repetition[:2], np.float32([1, 1.5]))
    np.testing.assert_array_equal(sampler.presence[:2], np.float32([0, -2]))
    np.testing.assert_array_equal(sampler.frequency[:2], np.float32([0, 0.5]))
    np.testing.assert_array_equal(inputs.base_key[0], base_key(7, 0))
    np.testing.assert_array_equal(inputs.base_key[1], base_key(2**64 - 1, 0))
    np.testing.assert_array_equal(inputs.block_tables, [[3, 1, 0], [5, 2, 9], [0, 0, 0]])


@pytest.mark.parametrize("prompt_logprobs", [None, 5])
def test_unpack_undoes_pack(prompt_logprobs):
    first = make_sequence(0, [10, 11, 12, 13, 14], slot=2)
    second = make_sequence(1, [20, 21], slot=0, output=(22, 23, 24))
    rows = [PlanRow(first, 2, 3, True), PlanRow(second, 1, 4, True)]
    shape = layout(prompt_logprobs=prompt_logprobs)
    pack = packer()
    packed = pack.pack(rows, shape)
    assert packed.dtype == np.int32
    assert packed.shape == (3, shape.num_columns)
    inputs = unpack(packed, shape)
    np.testing.assert_array_equal(inputs.state_slot, [2, 0, 4])
    np.testing.assert_array_equal(inputs.start, [2, 1, 0])
    np.testing.assert_array_equal(inputs.num_new, [3, 4, 0])
    np.testing.assert_array_equal(inputs.samples, [True, True, False])
    np.testing.assert_array_equal(inputs.first_position[:2], [0, 3])
    np.testing.assert_array_equal(inputs.tokens, [[12, 13, 14, 0], [21, 22, 23, 24], [0] * 4])
    if prompt_logprobs is None:
        assert inputs.targets is None
    else:
        np.testing.assert_array_equal(inputs.targets, [[13, 14, 0, 0], [0] * 4, [0] * 4])
    np.testing.assert_array_equal(inputs.sampler.bias_ids[:, 0], [4, 0, 0])
    np.testing.assert_array_equal(inputs.sampler.bias_values[:, 0], np.float32([-3.5, 0, 0]))
    check_constants(inputs)

    # Decode: the same constants from the packer's memory, no tokens.
    rows = [PlanRow(first, 5, 1, True), PlanRow(second, 5, 1, True)]
    shape = layout(num_new=1, is_decode=True)
    inputs = unpack(pack.pack(rows, shape), shape)
    assert inputs.tokens is None
    np.testing.assert_array_equal(inputs.start, [5, 5, 0])
    check_constants(inputs)


def test_rows_that_do_not_sample_use_the_dummy_state():
    sequence = make_sequence(0, [1, 2, 3, 4, 5], slot=1)
    shape = layout(num_rows=2, flags=SamplerFlags())
    rows = [PlanRow(sequence, 0, 4, False), PlanRow(sequence, 4, 1, True)]
    inputs = unpack(packer().pack(rows, shape), shape)
    np.testing.assert_array_equal(inputs.state_slot, [4, 1])
    np.testing.assert_array_equal(inputs.sampler.temperature, np.float32([0, 0.5]))


def test_branches_sample_from_their_request_s_row():
    """They follow the padded rows, carry state and parameters of their own, and compute nothing."""
    other = make_sequence(0, [1, 2], slot=0)
    leader = make_sequence(1, [1, 2, 3, 4, 5], slot=1)
    branches = [
        Sequence(leader.request, seq_id=1, max_tokens=8, sample_index=index) for index in (1, 2)
    ]
    for slot, branch in enumerate(branches, start=2):
        branch.state_slot = slot
    shape = layout(num_rows=4, num_branches=3, flags=SamplerFlags(bias_width=16))
    rows = [
        PlanRow(leader, 0, 4, False),
        PlanRow(other, 0, 2, True),
        PlanRow(leader, 4, 1, True),
    ]
    branch_rows = [PlanRow(branch, 5, 0, True) for branch in branches]
    packed = packer().pack(rows, shape, branches=branch_rows)
    assert packed.shape == (7, shape.num_columns)
    inputs = unpack(packed, shape)
    np.testing.assert_array_equal(inputs.state_slot, [4, 0, 1, 4, 2, 3, 4])
    np.testing.assert_array_equal(inputs.logits_row[:6], [0, 1, 2, 0, 2, 2])
    np.testing.assert_array_equal(inputs.num_new, [4, 2, 1, 0])
    assert inputs.tokens.shape == (4, 4)
    assert inputs.block_tables.shape == (4, 3)
    for entry, index in ((2, 0), (4, 1), (5, 2)):
        np.testing.assert_array_equal(inputs.base_key[entry], base_key(SEEDS[1], index))
        np.testing.assert_array_equal(inputs.sampler.repetition[entry], np.float32(1.5))
    assert inputs.sampler.bias_ids.shape == (7, 16)


@pytest.mark.parametrize(
    ("num_output", "num_pending", "banned"),
    [(0, 1, {2, 7, 9}), (1, 2, {2, 7, 9}), (2, 2, set()), (3, 1, set())],
)
def test_ends_are_banned_before_min_tokens(num_output, num_pending, banned):
    """``num_pending`` counts the token that this very step samples."""
    params = SamplingParams(min_tokens=3, stop_token_ids=[9], logit_bias={9: 100, 1: 2})
    request = Request("r", [1], params, eos_token_ids=(2, 7))
    sequence = Sequence(request, seq_id=0, max_tokens=8)
    sequence.output_token_ids += [5] * num_output
    sequence.num_pending = num_pending
    assert set(banned_ids(sequence)) == banned
    ids, values = biases_of(sequence)
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)
    logits = np.zeros(10, np.float32)
    np.add.at(logits, ids, values)
    assert set(np.flatnonzero(np.isneginf(logits))) == banned
    assert logits[1] == 2


def test_row_buckets_cover_every_number_of_rows():
    assert row_buckets(1, second=2) == (1,)
    assert row_buckets(2, second=8) == (1, 2)
    assert row_buckets(5, second=2) == (1, 2, 4, 5)
    for most in range(1, 70):
        for second in (2, 8):
            buckets = row_buckets(most, second=second)
            assert buckets[-1] == most
            assert list(buckets) == sorted(set(buckets))
            for count in range(1, most + 1):
                assert padded_rows(count, buckets) >= count


def test_a_state_slot_that_is_used_again_gets_the_new_parameters():
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=8)
    prompts = random_prompts(0, [5, 5])
    hot = SamplingParams(temperature=50.0, seed=1, max_tokens=12)
    cold = SamplingParams(temperature=0.0, max_tokens=12)
    mixed = engine.generate(prompts, [hot, cold])
    alone = [engine.generate(prompts[0], hot)[0], engine.generate(prompts[1], cold)[0]]
    assert [output.token_ids for output in mixed] == [output.token_ids for output in alone]
