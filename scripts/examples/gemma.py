"""A Gemma of google-deepmind's package through the engine: a toy one, or a checkpoint's weights.

python -m paged_jax_scripts.examples.gemma
python -m paged_jax_scripts.examples.gemma --folder=gemma3-270m-it --tokenizer=tokenizer.model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from paged_jax import Engine, EngineConfig, Model, SamplingParams
from paged_jax.integrations import gemma
from paged_jax_scripts import cli

FOLDER = flags.DEFINE_string("folder", None, "an orbax checkpoint of Gemma 3 270M; None: a toy")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "its tokenizer.model; needed with --folder")
PROMPT = flags.DEFINE_multi_string("prompt", ["Once upon a time"], "a text; with --folder only")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 16, "tokens a request", lower_bound=1)
TOY_PROMPTS = [[5, 9, 3], [8] * 20, [4, 17, 30, 2, 2, 1, 60]]


def toy_model(gm: Any) -> Model:
    """A small Gemma 3 of random weights: five layers with a window of 8 tokens, one without."""
    config = dataclasses.replace(
        gm.nn.Gemma3_270M.config,
        num_embed=64,
        embed_dim=32,
        hidden_dim=64,
        head_dim=16,
        attention_types=gm.nn.config.GEMMA3_ATTENTION_PATTERN,
        sliding_window_size=8,
    )
    zoo_model = gm.nn.Gemma3_270M(config=config, dtype=jnp.float32)
    params = zoo_model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return gemma.as_model(zoo_model, params, max_position=128)


def real_model(gm: Any, tokenizer: Any) -> Model:
    """The weights of ``--folder``."""
    ends = tokenizer.special_tokens
    return gemma.as_model(
        gm.nn.Gemma3_270M(),
        gm.ckpts.load_params(FOLDER.value),
        max_position=32768,
        eos_token_ids=(int(ends.EOS), int(ends.END_OF_TURN)),
    )


def main(argv: Sequence[str]) -> None:
    """Generate, and print a line a prompt.

    Raises:
      ValueError: a folder without a tokenizer.
    """
    del argv
    from gemma import gm  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    if FOLDER.value is None:
        prompts, decode, model = TOY_PROMPTS, str, toy_model(gm)
    elif TOKENIZER.value is None:
        raise ValueError("--tokenizer=None must be the file tokenizer.model with --folder")
    else:
        tokenizer = gm.text.Gemma3Tokenizer(TOKENIZER.value)
        prompts = [tokenizer.encode(text, add_bos=True) for text in PROMPT.value]
        decode, model = tokenizer.decode, real_model(gm, tokenizer)
    engine = Engine(model, config=EngineConfig(max_num_seqs=8, max_model_len=128))
    params = SamplingParams(max_tokens=MAX_TOKENS.value, temperature=0.0)
    for output in engine.generate(prompts, params):
        print(decode(list(output.token_ids)))


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
