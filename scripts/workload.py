"""The built-in workloads: 32 requests as token ids, with the lengths of their outputs."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any

WORDS = (
    "apples pencils candles carrots blankets hammers oranges saucers buckets lemons mirrors ropes "
    "kettles onions pillows nails cherries lanterns spoons matches"
)
CODE = """def {name}(values):
    total = 0
    for value in values:
        if value > {limit}:
            total += value * {limit}
    return total
"""


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
    return [Request(**record) for record in _read("workload_32.json")["requests"]]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests that begin alike.

    Attributes:
      prefix_token_ids: what all prompts begin with.
      requests: with whole prompts.
    """

    prefix_token_ids: list[int]
    requests: list[Request]


def load_shared_prefix() -> SharedPrefix:
    """32 requests whose first 256 prompt tokens are equal (9,474 prompt, 1,388 output tokens)."""
    data = _read("workload_32_shared_prefix.json")
    prefix = data["prefix_token_ids"]
    requests = [
        Request(prefix + record["prompt_token_ids"], record["max_tokens"])
        for record in data["requests"]
    ]
    return SharedPrefix(prefix, requests)


def copying_prompts(num_prompts: int) -> list[str]:
    """Lists and functions, whole, and then begun once more."""
    prompts = []
    for number in range(num_prompts):
        if number % 2:
            code = CODE.format(name=f"sum_above_{number}", limit=number)
            prompts.append(f"{code}\n{code}\n{code[:30]}")
            continue
        words = WORDS.split()
        items = [words[(7 * number + 3 * place) % len(words)] for place in range(16)]
        text = "".join(f"- {item}\n" for item in items)
        prompts.append(
            f"My list:\n{text}\nThe same list again:\n{text}\nAnd once more:\n- {items[0]}"
        )
    return prompts


def prose_prompts(num_prompts: int) -> list[list[int]]:
    """The shortest of the built-in requests."""
    requests = sorted(load(), key=lambda request: len(request.prompt_token_ids))
    return [list(request.prompt_token_ids) for request in requests[:num_prompts]]


def _read(name: str) -> dict[str, Any]:
    file = importlib.resources.files("paged_jax_scripts") / "data" / name
    return json.loads(file.read_text(encoding="utf-8"))
