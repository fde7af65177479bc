"""Speculation on the real weights: texts that copy their prompt, and prose; equal tokens."""

import numpy as np
import pytest

from paged_jax import Engine, EngineConfig, KVPool, NgramSpeculation, SamplingParams
from paged_jax_scripts import workload

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("smollm2")]

NEAR_TIE = 2e-3


def run(model, prompts, params, speculation):
    config = EngineConfig(
        max_num_seqs=4, max_model_len=512, speculation=speculation, debug_integrity=True
    )
    engine = Engine(model, config=config)
    engine.executor.pool = KVPool.create(
        model.spec, num_blocks=engine.num_blocks, block_size=16, fill=np.nan
    )
    outputs = engine.generate(prompts, params)
    assert engine.num_used_blocks == 0
    return engine.stats, outputs


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.long)])
def test_the_tokens_are_equal_but_for_near_ties_and_steps_are_saved(smollm2, temperature):
    prompts = [
        *map(smollm2.tokenizer.encode, workload.copying_prompts(2)),
        *workload.prose_prompts(1),
    ]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, logprobs=2)
    plain, expected = run(smollm2, prompts, params, None)
    stats, outputs = run(smollm2, prompts, params, NgramSpeculation())
    print(f"{stats.num_accepted_tokens} of {stats.num_drafted_tokens} accepted, "
          f"{stats.num_steps} steps for {plain.num_steps}")  # fmt: skip
    for output, other in zip(outputs, expected, strict=True):
        pairs = zip(output.token_ids, other.token_ids, strict=False)
        parts = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parts is None:
            assert output.finish_reason == other.finish_reason
            continue
        (_, best), (_, second) = other.logprobs[parts].top
        print(f"{output.request_id} parts at step {parts}, margin {best - second:.2e}")
        assert temperature == 0
        assert best - second < NEAR_TIE
    assert stats.acceptance_rate > 0.3
    assert stats.num_accepted_tokens > 20
