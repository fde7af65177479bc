"""This library's engine, spoken to as the peers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import protocol

from models import load_model
from paged_jax import Engine, EngineConfig, SamplingParams


def load(command: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Make the engine; programs stay compiled from run to run."""
    if command.get("compilation_cache"):
        jax.config.update("jax_compilation_cache_dir", command["compilation_cache"])
    requests = command["requests"]
    model = load_model(
        command["folder"], dtype=command["dtype"], progress=False, unroll=command["unroll"]
    )
    config = EngineConfig(
        kv_dtype=command["dtype"],
        prefix_cache=False,
        max_num_seqs=len(requests),
        max_model_len=command["max_model_len"],
    )
    engine = Engine(model, config=config)

    def params(index: int, max_tokens: int) -> SamplingParams:
        if not command["sampled"]:
            return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        is_penalised = index % 2 == 1
        return SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=1.1 if is_penalised else 1.0,
            presence_penalty=0.3 if is_penalised else 0.0,
        )

    def run() -> dict[str, Any]:
        timer = protocol.Timer(len(requests))
        tokens: list[list[int]] = [[] for _ in requests]
        names: dict[str, int] = {}
        for index, request in enumerate(requests):
            wanted = params(index, request["max_tokens"])
            names[engine.add_request(request["prompt_token_ids"], wanted)] = index
        while engine.has_unfinished:
            for output in engine.step():
                index = names[output.request_id]
                tokens[index] = list(output.token_ids)
                timer.saw(index, len(output.token_ids))
        return timer.answer(tokens)

    return run


if __name__ == "__main__":
    protocol.serve(load)
