"""Hugging Face transformers on torch's CPU: all requests as one padded batch of ``generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import protocol
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    StoppingCriteria,
)


class Watch(StoppingCriteria):
    """Sees each token as it comes; stops nothing.

    Args:
      timer: of the run.
      limits: tokens that each request asks for; what comes after them is nobody's.
      width: padded width of the prompts.
    """

    def __init__(self, timer: protocol.Timer, limits: list[int], width: int) -> None:
        self._timer, self._limits, self._width = timer, limits, width

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Note that every row has one token more."""
        del scores, kwargs
        count = input_ids.shape[1] - self._width
        for row, limit in enumerate(self._limits):
            self._timer.saw(row, min(count, limit))
        return torch.zeros(len(self._limits), dtype=torch.bool)


def load(command: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Read the weights and pad the prompts on the left."""
    requests = command["requests"]
    model = AutoModelForCausalLM.from_pretrained(
        command["folder"], dtype=getattr(torch, command["dtype"])
    ).eval()
    prompts = [request["prompt_token_ids"] for request in requests]
    limits = [request["max_tokens"] for request in requests]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options: dict[str, Any] = {"cache_implementation": "static"} if "static" in sys.argv else {}

    def run() -> dict[str, Any]:
        timer = protocol.Timer(len(requests))
        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(limits),
                min_new_tokens=max(limits),
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=[Watch(timer, limits, width)],
                **options,
            )
        tokens = out[:, width:].tolist()
        return timer.answer([row[:limit] for row, limit in zip(tokens, limits, strict=True)])

    return run


if __name__ == "__main__":
    protocol.serve(load)
