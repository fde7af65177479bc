"""The built-in workload: 32 requests as token ids, with the lengths of their outputs."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens to generate, end tokens ignored.

    Attributes:
      prompt_token_ids: SmolLM2's token ids.
      max_tokens: tokens to generate.
    """

    prompt_token_ids: list[int]
    max_tokens: int


def load() -> list[Request]:
    """The 32 requests (4,560 prompt and 2,277 output tokens)."""
    file = importlib.resources.files("paged_jax_scripts") / "data" / "workload_32.json"
    records = json.loads(file.read_text(encoding="utf-8"))["requests"]
    return [Request(**record) for record in records]
