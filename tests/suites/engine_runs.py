"""Engines for tests, a driver that checks every step, and what outputs must be, in numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from suites import hash_model

from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.model import Model
from paged_jax.outputs import PositionLogprobs, RequestOutput
from paged_jax.pool import KVPool
from paged_jax.sampling.params import SamplingParams
from paged_jax.step import make_step

# 16 blocks of 4: one sequence of the maximum length fills the pool, four of 20 tokens do not fit.
STANDARD: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 17,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "prefill_row_len": 8,
    "max_model_len": 64,
    "debug_integrity": True,
}
MAX_STEPS = 5000

# Engines of one model and geometry run the same programs: tests compile each only once.
_shared_step = functools.cache(make_step)
_hash_model = functools.cache(hash_model.make_model)


def make_engine(model: Model | None = None, **config: Any) -> Engine:
    """An engine of the hash model (or another), ``STANDARD`` but for ``config``."""
    settings = EngineConfig(**{**STANDARD, **config})
    engine = Engine(model or _hash_model(), config=settings)
    engine.executor._step = _shared_step(
        engine.model.apply, backend=settings.attention_backend, donate=settings.donate
    )
    return engine


def num_cached(engine: Engine, tokens: list[int], *, cache_salt: str | None = None) -> int:
    """How many of these tokens a request that has more would find."""
    namespace = engine._namespace(cache_salt)
    return engine.block_manager.lookup(namespace, [*tokens, 0]).num_tokens


def fill_pool(engine: Engine, value: float) -> None:
    """Replace the whole pool's content; the engine must be idle."""
    assert not engine.has_unfinished
    engine.reset_prefix_cache()
    pool = engine.executor.pool
    engine.executor.pool = KVPool.create(
        engine.model.spec,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        dtype=pool.blocks.dtype,
        fill=value,
    )


def garbage_pool(engine: Engine, seed: int) -> None:
    """As after many earlier runs: every slot holds some number, the null block too."""
    assert not engine.has_unfinished
    engine.reset_prefix_cache()
    blocks = engine.executor.pool.blocks
    noise = np.random.default_rng(seed).normal(0, 1e3, blocks.shape).astype(blocks.dtype)
    engine.executor.pool = KVPool(jax.device_put(noise))


def check_step(engine: Engine) -> None:
    """Waste stays under one block a running sequence, and all blocks are accounted for."""
    stats = engine.block_manager.stats()
    if engine.config.reservation == "paged":
        waste_limit = engine.scheduler.num_running * (engine.config.block_size - 1)
        assert stats.waste <= waste_limit, stats
    assert min(engine.block_manager.memory_use()) >= 0
    assert stats.used + stats.free == stats.total
    assert stats.used == engine.num_used_blocks


def drive(
    engine: Engine, *, before_step: Callable[[int], object] = lambda index: None
) -> dict[str, list[RequestOutput]]:
    """Step to the end; returns all outputs of each request, checked against each other.

    ``before_step`` gets the number of the step; while it returns True there is more to come.
    """
    outputs: dict[str, list[RequestOutput]] = {}
    for index in range(MAX_STEPS):
        more_to_come = before_step(index) is True
        if not (engine.has_unfinished or more_to_come):
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        check_step(engine)
    assert not engine.has_unfinished, "no end in sight"
    assert_idle(engine)
    for some in outputs.values():
        check_outputs(some)
    return outputs


def assert_idle(engine: Engine) -> None:
    """Nothing lives and every block is free."""
    assert not engine.has_unfinished
    engine.scheduler.check_integrity()
    assert engine.num_used_blocks == 0
    assert engine.block_manager.num_sequences == 0
    assert not engine.scheduler.has_unfinished


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """One request's outputs in order: deltas add up, only the last is final."""
    last = outputs[-1]
    assert last.finished
    assert not any(output.finished for output in outputs[:-1])
    for place, final in enumerate(last.outputs):
        parts = [output.outputs[place] for output in outputs]
        assert sum((part.delta_token_ids for part in parts), ()) == final.token_ids
        assert "".join(part.delta_text for part in parts) == final.text
        assert {part.index for part in parts} == {final.index}
        assert final.finish_reason is not None
    count = 0
    for output in outputs:
        count += len(output.delta_token_ids)
        assert output.token_ids == last.token_ids[:count]
        assert last.text.startswith(output.text)
        assert (output.finish_time is not None) == output.finished
    times = [last.arrival_time, last.first_token_time or last.arrival_time, last.finish_time]
    assert times == sorted(times)


def run_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[RequestOutput]:
    """Drive requests together; returns their last outputs in order."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = engine.add_requests(list(prompts), many)
    outputs = drive(engine, **options)
    return [outputs[request_id][-1] for request_id in ids]


def random_mix(
    engine: Engine, seed: int, *, after_step: Callable[[], object] = lambda: None, num: int = 12
) -> dict[str, list[RequestOutput]]:
    """Greedy (top 1), sampled and parallel requests that come and are cancelled at random steps.

    Which and when depends on the seed alone, so equal engines give equal outputs.
    """
    rng = np.random.default_rng(seed)
    vocab_size = min(engine.model.spec.vocab_size, hash_model.VOCAB_SIZE)
    ids: list[str] = []

    def before_step(index: int) -> bool:
        after_step()
        if len(ids) < num and rng.random() < 0.5:
            length, max_tokens = (int(size) for size in rng.integers(1, 24, 2))
            params = SamplingParams(
                top_k=int(rng.choice([1, 0])),  # both by the same few programs
                n=int(rng.choice([1, 1, 2, 3])),
                seed=len(ids),
                max_tokens=max_tokens,
            )
            prompt = rng.integers(0, vocab_size, length).tolist()
            ids.append(engine.add_request(prompt, params))
        if ids and rng.random() < 0.05:
            engine.cancel(ids[int(rng.integers(len(ids)))])
        return len(ids) < num

    outputs = drive(engine, before_step=before_step)
    after_step()
    return outputs


def greedy(max_tokens: int | None = 8, **params: Any) -> SamplingParams:
    """Greedy sampling parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def sampled(max_tokens: int = 14, **fields: Any) -> SamplingParams:
    """Parameters that use every feature, so that all batches run the same few programs."""
    common = {"presence_penalty": 0.2, "logit_bias": {1: 0.5}, "logprobs": 3}
    return SamplingParams(max_tokens=max_tokens, **{**common, **fields})


def adjusted_logits(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Bias, then penalties, by the formulas of ``SamplingParams``, in float32."""
    logits = logits.astype(np.float32)
    for token, bias in params.bias_pairs:
        logits[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        logits[list(ends)] = -np.inf
    counts = np.bincount(output, minlength=len(logits)) if output else np.zeros(len(logits), int)
    seen = counts > 0
    seen[list(prompt)] = True
    repetition = np.float32(params.repetition_penalty)
    logits = np.where(
        seen, np.where(logits > 0, logits / repetition, logits * repetition), logits
    ).astype(np.float32)
    logits -= np.where(counts > 0, np.float32(params.presence_penalty), np.float32(0))
    return logits - np.float32(params.frequency_penalty) * counts.astype(np.float32)


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, *, eos: Sequence[int] = (), room: int = 10**6
) -> tuple[list[int], str]:
    """What the hash model's greedy request must yield: tokens and finish reason."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    banned = sorted(set(params.stop_token_ids) | set(eos))
    limit = room - len(prompt) if params.max_tokens is None else params.max_tokens
    output: list[int] = []
    while len(output) < min(limit, room - len(prompt)):
        logits = hash_model.expected_logits([*prompt, *output])[-1]
        adjusted = adjusted_logits(logits, prompt, output, params, ends=banned)
        output.append(int(np.argmax(adjusted)))
        if output[-1] in stops:
            return output, "stop"
    return output, "length"


def check_greedy(outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> None:
    """Every output is exactly what the request would yield by the formulas."""
    for output, one in zip(outputs, params, strict=True):
        expected = expected_tokens(output.prompt_token_ids, one)
        assert (list(output.token_ids), output.finish_reason) == expected, output


def random_prompts(seed: int, lens: Sequence[int]) -> list[list[int]]:
    """Prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, hash_model.VOCAB_SIZE, length).tolist() for length in lens]


def log_softmax(tokens: Sequence[int]) -> np.ndarray:
    """The hash model's log-probabilities after each token, in float64."""
    logits = hash_model.expected_logits(tokens).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check_entry(entry: PositionLogprobs, logprobs: np.ndarray, token: int, num_top: int) -> None:
    """One position's entry is that of raw log-softmax; ties rank by token id."""
    assert entry.token_id == token
    assert abs(entry.logprob - logprobs[token]) < 1e-5
    assert entry.rank == 1 + (logprobs > logprobs[token]).sum()
    order = np.lexsort((np.arange(len(logprobs)), -logprobs))[:num_top]
    assert [token for token, _ in entry.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in entry.top], logprobs[order], atol=1e-5)


def check_logprobs(output: RequestOutput, params: SamplingParams) -> None:
    """All of an output's log-probabilities are those of the hash model's logits."""
    prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
    expected = log_softmax(prompt + tokens)
    if params.logprobs is None:
        assert output.logprobs is None
    else:
        assert len(output.logprobs or ()) == len(tokens)
        for index, entry in enumerate(output.logprobs or ()):
            check_entry(entry, expected[len(prompt) + index - 1], tokens[index], params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        first, *entries = output.prompt_logprobs or ()
        assert first is None
        assert len(entries) == len(prompt) - 1
        for index, entry in enumerate(entries):
            assert entry is not None
            check_entry(entry, expected[index], prompt[index + 1], params.prompt_logprobs)
