"""A Flax model of transformers through the engine: a toy one, or the weights of a folder.

python -m paged_jax_scripts.examples.transformers_flax
python -m paged_jax_scripts.examples.transformers_flax --folder=my-llama --prompt="Once upon a time"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.integrations import transformers_flax
from paged_jax_scripts import cli

FOLDER = flags.DEFINE_string(
    "folder", None, "weights, config and tokenizer as save_pretrained writes them; None: a toy"
)
PROMPT = flags.DEFINE_multi_string("prompt", ["Once upon a time"], "a text; with --folder only")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 16, "tokens a request", lower_bound=1)
TOY_PROMPTS = [[5, 9, 3], [8] * 20, [4, 17, 30, 2, 2, 1, 60]]


def toy_model() -> Any:
    """A Mistral of random weights, with a window of 8 tokens."""
    from transformers import (  # pyright: ignore[reportMissingImports]
        FlaxMistralForCausalLM,
        MistralConfig,
    )

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=8,
    )
    return FlaxMistralForCausalLM(config)


def main(argv: Sequence[str]) -> None:
    """Generate, and print a line a prompt."""
    del argv
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoTokenizer,
        FlaxAutoModelForCausalLM,
    )

    if FOLDER.value is None:
        prompts, decode, zoo_model = TOY_PROMPTS, str, toy_model()
    else:
        tokenizer = AutoTokenizer.from_pretrained(FOLDER.value)
        prompts, decode = [tokenizer.encode(text) for text in PROMPT.value], tokenizer.decode
        zoo_model = FlaxAutoModelForCausalLM.from_pretrained(FOLDER.value)
    engine = Engine(transformers_flax.as_model(zoo_model), config=EngineConfig(max_num_seqs=8))
    params = SamplingParams(max_tokens=MAX_TOKENS.value, temperature=0.0)
    for output in engine.generate(prompts, params):
        print(decode(list(output.token_ids)))


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
