import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from paged_jax import row_state
from paged_jax.sampling.inputs import SamplerFlags, pack_inputs, sampler_flags
from paged_jax.sampling.noise import base_key
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sampler import adjust_logits, sample

VOCAB = 120
jitted_sample = jax.jit(sample, static_argnames="flags")


def start(slots, seeds, *, num_rows=8, output_lens=None, sample_index=0):
    state = row_state.create(num_rows)
    zeros = jnp.zeros(len(slots), jnp.int32)
    lens = zeros if output_lens is None else jnp.asarray(output_lens, jnp.int32)
    keys = jnp.asarray(np.stack([base_key(seed, sample_index) for seed in seeds]))
    return row_state.start_rows(state, jnp.asarray(slots, jnp.int32), zeros, lens, keys)


def sample_rows(logits, params, state, slots, *, banned=(), flags=None, batch=None):
    flags = flags or sampler_flags(params, banned=banned)
    batch = batch or len(params)
    inputs = pack_inputs(params, num_rows=batch, bias_width=flags.bias_width, banned=banned)
    pad = batch - len(params)
    logits = np.pad(np.asarray(logits), ((0, pad), (0, 0)))
    slots = jnp.asarray([*slots, *[state.num_rows] * pad], jnp.int32)
    inputs = jax.tree.map(jnp.asarray, inputs)
    return jitted_sample(jnp.asarray(logits), inputs, state, slots, flags=flags)


def generate(num_tokens, params, *, row, batch, slot, neighbours, done=(), seed=42):
    """Token ids of one sequence whose logits depend on its last token only."""
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    noisy = np.random.default_rng(len(neighbours) + row)
    slots, seeds, rows = [], [], []
    others = list(neighbours)
    for i in range(batch):
        mine = i == row
        slots.append(slot if mine else (slot + 1 + i) % 8)
        seeds.append(seed if mine else int(noisy.integers(2**32)))
        rows.append(params if mine or not others else others.pop())
    lens = [len(done) if i == row else int(noisy.integers(50)) for i in range(batch)]
    state = start(slots, seeds, output_lens=lens)
    tokens = list(done)
    while len(tokens) < num_tokens:
        logits = noisy.normal(size=(batch, VOCAB)).astype(np.float32)
        logits[row] = table[tokens[-1] if tokens else 0]
        result = sample_rows(logits, rows, state, slots)
        state = row_state.record(state, jnp.asarray(slots, jnp.int32), result.tokens)
        tokens.append(int(result.tokens[row]))
    return tokens


@pytest.mark.parametrize("top_k", [0, 9])
def test_several_positions_at_once_draw_what_they_draw_one_by_one(top_k):
    logits = np.random.default_rng(1).normal(size=(6, VOCAB)).astype(np.float32)
    params = SamplingParams(seed=5, top_k=top_k)
    state = start([2], [5], output_lens=[3])
    inputs = jax.tree.map(jnp.asarray, pack_inputs([params] * 6, num_rows=6, bias_width=0))
    slots, offsets = jnp.full(6, 2, jnp.int32), jnp.arange(6, dtype=jnp.int32)
    flags = sampler_flags([params])
    together = jitted_sample(
        jnp.asarray(logits), inputs, state, slots, flags=flags, offsets=offsets
    )
    tokens = []
    for row in logits:
        result = sample_rows(row[None], [params], state, [2])
        state = row_state.record(state, jnp.asarray([2], jnp.int32), result.tokens)
        tokens.append(int(result.tokens[0]))
    assert together.tokens.tolist() == tokens
    unmoved = jitted_sample(jnp.asarray(logits), inputs, state, slots, flags=flags)
    assert unmoved.tokens.tolist() != tokens


PARAMS = {
    "plain": SamplingParams(seed=42),
    "top_p": SamplingParams(seed=42, temperature=1.3, top_p=0.8),
    "top_k": SamplingParams(seed=42, top_k=5),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_b67_a_seeded_row_is_the_same_whatever_else_runs(params):
    run = functools.partial(generate, 12, params)
    alone = run(row=0, batch=1, slot=0, neighbours=[])
    greedy, free = SamplingParams(temperature=0.0), SamplingParams()
    for _ in range(4):
        assert run(row=0, batch=2, slot=0, neighbours=[free]) == alone
    assert run(row=0, batch=2, slot=5, neighbours=[greedy]) == alone
    assert run(row=3, batch=4, slot=2, neighbours=[free, greedy, free]) == alone
    assert run(row=7, batch=8, slot=7, neighbours=[SamplingParams(logit_bias={1: 3.0})]) == alone
    # After a preemption: another slot, its key and its output length set again.
    assert run(row=1, batch=2, slot=3, neighbours=[free], done=alone[:5]) == alone
    assert generate(12, params, row=0, batch=1, slot=0, neighbours=[], seed=43) != alone


def test_samples_of_one_request_differ():
    logits = np.zeros((1, VOCAB), np.float32)
    params = [SamplingParams(seed=1)]
    tokens = [
        int(sample_rows(logits, params, start([0], [1], sample_index=i), [0]).tokens[0])
        for i in range(8)
    ]
    assert len(set(tokens)) > 5


def test_b69_extreme_parameters_in_one_batch():
    rng = np.random.default_rng(3)
    rows = [
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        for temperature in (0, 1e-8, 1e-5, 1e-4)
        for top_p in (0, 1e-6, 1)
        for top_k in (0, -1, 1, VOCAB, VOCAB + 5)
        for min_p in (0, 1)
    ]
    rows += [SamplingParams(top_p=0), SamplingParams(top_k=1), SamplingParams(min_p=1)]
    logits = rng.normal(size=(len(rows), VOCAB)).astype(np.float16)
    logits[:, :3] = [10, 9, -np.inf]
    logits[::2] *= 1000  # up to the largest float16 numbers
    slots = list(range(len(rows)))
    state = start(slots, slots, num_rows=len(rows))
    result = sample_rows(logits, rows, state, slots)
    assert result.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert not result.has_nan.any()


def test_b69_a_batch_mixes_greedy_and_chance():
    logits = np.random.default_rng(4).normal(size=(4, VOCAB)).astype(np.float32)
    rows = [SamplingParams(temperature=0), SamplingParams(temperature=5), SamplingParams(top_k=1)]
    state = start([0, 1, 2, 3], [9, 9, 9, 9])
    result = sample_rows(logits, [*rows, SamplingParams(temperature=1e-6)], state, [0, 1, 2, 3])
    best = logits.argmax(axis=1)
    assert result.tokens[0] == best[0]
    assert result.tokens[1] != best[1]
    assert result.tokens[2] == best[2]
    assert result.tokens[3] == best[3]


def penalised(logits, params, prompt, output):
    """The penalties by their formulas, a token at a time."""
    logits = logits.astype(np.float64)
    for token in range(len(logits)):
        count = output.count(token)
        if token in prompt or count:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.presence_penalty * (count > 0)
        logits[token] -= params.frequency_penalty * count
    return logits


@pytest.mark.parametrize("output", [[], [6, 9], [6, 9, 9, 0]])
def test_b71_penalties_count_what_they_say_and_never_padding(output):
    prompt = [5, 5, 6]
    logits = np.random.default_rng(5).normal(size=(2, 12)).astype(np.float32) * 3
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=-0.3)
    neutral = SamplingParams()
    flags = sampler_flags([params, neutral])
    tokens = jnp.array([*prompt, *output, *[0] * (16 - len(prompt) - len(output))], jnp.int32)
    state = row_state.with_penalties(start([2, 1], [0, 1]), 12)

    loaded = row_state.load_counts(
        state, jnp.int32(2), tokens, jnp.int32(3), jnp.int32(len(tokens))
    )
    assert int(loaded.output_counts[2].sum()) == 13  # what a wrong total length would count
    total = jnp.int32(len(prompt) + len(output))
    rebuilt = row_state.load_counts(state, jnp.int32(2), tokens, jnp.int32(3), total)
    stepped = row_state.load_counts(state, jnp.int32(2), tokens, jnp.int32(3), jnp.int32(3))
    for token in output:
        stepped = row_state.record(stepped, jnp.array([2, 8]), jnp.array([token, 0]))
    inputs = pack_inputs([params, neutral], num_rows=2, bias_width=0)
    for counted in (rebuilt, stepped):
        adjusted = adjust_logits(
            jnp.asarray(logits), inputs, counted, jnp.array([2, 1]), flags=flags
        )
        np.testing.assert_allclose(
            adjusted[0], penalised(logits[0], params, prompt, output), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_array_equal(adjusted[1], logits[1])


def test_penalties_come_after_the_bias_and_need_counts():
    logits = jnp.zeros((1, 12), jnp.float32)
    params = SamplingParams(logit_bias={5: 3.0}, repetition_penalty=1.5)
    flags = sampler_flags([params])
    inputs = pack_inputs([params], num_rows=1, bias_width=flags.bias_width)
    state = start([0], [0])
    with pytest.raises(ValueError, match="output_counts"):
        adjust_logits(logits, inputs, state, jnp.array([0]), flags=flags)
    state = row_state.with_penalties(state, 12)
    tokens = jnp.array([5], jnp.int32)
    state = row_state.load_counts(state, jnp.int32(0), tokens, jnp.int32(1), jnp.int32(1))
    adjusted = adjust_logits(logits, inputs, state, jnp.array([0]), flags=flags)
    assert adjusted[0, 5] == 2.0


def test_b72_logprobs_are_the_models_own():
    logits = np.random.default_rng(6).normal(size=(1, VOCAB)).astype(np.float32) * 3
    expected = log_softmax(logits[0].astype(np.float64))
    best = np.argsort(-logits[0])
    reports = []
    for temperature, seed in [(0.1, 1), (2.0, 1), (2.0, 2), (2.0, 3)]:
        params = SamplingParams(temperature=temperature, logprobs=3, seed=seed)
        result = sample_rows(logits, [params], start([0], [seed]), [0])
        report, token = result.logprobs, int(result.tokens[0])
        assert report.rank[0] == np.flatnonzero(best == token)[0] + 1
        np.testing.assert_allclose(report.logprob[0], expected[token], atol=1e-5)
        assert report.top_ids[0, :3].tolist() == best[:3].tolist()
        np.testing.assert_allclose(report.top_logprobs[0, :3], expected[best[:3]], atol=1e-5)
        reports.append(report)
    assert max(int(report.rank[0]) for report in reports) > 3
    # Biases, bans and top_k=1 change the token, not what is reported.
    params = SamplingParams(top_k=1, logit_bias={int(best[2]): 50.0}, logprobs=3)
    result = sample_rows(logits, [params], start([0], [1]), [0], banned=[[int(best[0])]])
    assert result.tokens[0] == best[2]
    assert result.logprobs.rank[0] == 3
    np.testing.assert_allclose(result.logprobs.logprob[0], expected[best[2]], atol=1e-5)
    assert sample_rows(logits, [SamplingParams()], start([0], [1]), [0]).logprobs is None


def test_banned_tokens_are_never_sampled():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 7] = 50.0
    logits[:, 2] = 40.0
    rows = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(logit_bias={7: 100})]
    rows.append(SamplingParams(temperature=0))
    result = sample_rows(
        logits, rows, start([0, 1, 2, 3], [0, 1, 2, 3]), [0, 1, 2, 3], banned=[[7, 2]] * 3
    )
    assert not np.isin(result.tokens[:3], [7, 2]).any()
    assert result.tokens[3] == 7
    assert not result.has_nan.any()


@pytest.mark.parametrize("vocab", [5, 120, 4099])
@pytest.mark.parametrize("greedy", [True, False])
def test_rows_without_a_distribution_are_flagged(vocab, greedy):
    logits = np.random.default_rng(7).normal(size=(6, vocab)).astype(np.float32)
    logits[0, 0] = np.nan
    logits[1, vocab - 1] = -np.float32(np.nan)
    logits[2, 1] = np.inf
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    rows = [SamplingParams(temperature=0.0 if greedy else 1.0)] * 6
    slots = list(range(6))
    result = sample_rows(logits, rows, start(slots, slots), slots, batch=8)
    assert result.has_nan.tolist() == [True] * 4 + [False] * 4
    assert ((result.tokens >= 0) & (result.tokens < vocab)).all()
    assert result.tokens[4] == 0


@pytest.mark.parametrize("greedy", [True, False])
def test_a_healthy_call_passes_debug_nans_and_strict_promotion(greedy):
    logits = np.random.default_rng(8).normal(size=(3, VOCAB)).astype(np.float32)
    logits[:, 3:90] = -np.inf
    rows = [
        SamplingParams(temperature=0.0 if greedy else 1e-4, repetition_penalty=1.2, logprobs=5),
        SamplingParams(temperature=0.0 if greedy else 0.8, top_p=0.9, min_p=0.1, logprobs=0),
        SamplingParams(temperature=0.0 if greedy else 2.0, top_k=100, top_p=0.99),
    ]
    state = row_state.with_penalties(start([0, 1, 2], [0, 1, 2]), VOCAB)
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        result = sample_rows(logits, rows, state, [0, 1, 2], banned=[[1], [2], [0]], batch=4)
        state = row_state.record(state, jnp.array([0, 1, 2, 8]), result.tokens)
    assert not result.has_nan.any()
    assert state.output_len[:3].tolist() == [1, 1, 1]


def test_flags_decide_the_code_and_not_the_token():
    logits = np.random.default_rng(9).normal(size=(2, VOCAB)).astype(np.float32)
    rows = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)]
    state = row_state.with_penalties(start([0, 1], [0, 1]), VOCAB)
    plain = sample_rows(logits, rows, state, [0, 1])
    full = SamplerFlags(greedy_only=False, penalties=True, bias_width=16, num_logprobs=5)
    assert sample_rows(logits, rows, state, [0, 1], flags=full).tokens.tolist() == (
        plain.tokens.tolist()
    )
