"""vLLM on CPU, in process, eager (its compiled mode takes minutes to start and is no faster)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
cores = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))

import protocol  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402  # pyright: ignore[reportMissingImports]


def load(command: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Make the engine."""
    requests, longest = command["requests"], command["max_model_len"]
    llm = LLM(
        model=command["folder"],
        dtype=command["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=len(requests),
        max_num_batched_tokens=max(512, longest),
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    rounds = iter(range(1_000_000))

    def run() -> dict[str, Any]:
        prefix = f"{next(rounds)}-"
        timer = protocol.Timer(len(requests))
        tokens: list[list[int]] = [[] for _ in requests]
        for index, request in enumerate(requests):
            count = request["max_tokens"]
            params = SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": request["prompt_token_ids"]}
            engine.add_request(f"{prefix}{index}", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id.removeprefix(prefix).split("-")[0])
                tokens[index] = list(output.outputs[0].token_ids)
                timer.saw(index, len(tokens[index]))
        return timer.answer(tokens)

    return run


if __name__ == "__main__":
    protocol.serve(load)
