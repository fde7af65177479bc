"""Train a new model, or fine-tune one that exists, on text files; then serve what came out.

    python scripts/make_stories.py --out=stories.txt
    python scripts/train.py --text=stories.txt --out=runs/stories
    python scripts/train.py --text=mine.txt --model=smollm2-135m-instruct --out=runs/mine \
        --learning_rate=2e-5 --batch_size=4 --seq_len=256 --num_steps=100

The same command goes on where a run that was interrupted stopped. docs/training.md says more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from rich.console import Console

from models.tokenizer import Tokenizer
from paged_jax_scripts import cli
from paged_jax_scripts.training.byte_tokenizer import END_OF_TEXT
from paged_jax_scripts.training.display import TrainingDisplay
from paged_jax_scripts.training.run import Run, train
from paged_jax_scripts.training.settings import Cadence, TrainSettings
from paged_jax_scripts.training.start import Start, existing_model, new_model
from paged_jax_scripts.training.text import TokenRows, read_documents, split_off, tokenize

TEXT = flags.DEFINE_multi_string("text", [], "a UTF-8 text file; repeat for several")
EVAL_TEXT = flags.DEFINE_multi_string(
    "eval_text", [], "a file to evaluate on; none: the last --eval_share of the text"
)
EVAL_SHARE = flags.DEFINE_float("eval_share", 0.05, "of the text's tokens, held out")
SEPARATOR = flags.DEFINE_string(
    "separator", "<|endoftext|>", "what stands between two texts of a file; '': nothing does"
)
OUT = flags.DEFINE_string("out", "runs/train", "the run's folder: checkpoints, metrics, the model")
FAMILY = flags.DEFINE_string("family", "llama", "of a new model")
SIZES = flags.DEFINE_string(
    "sizes", "{}", "JSON of a new model's settings where they are not the million-weight ones"
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "folder with a new model's tokenizer; none: a token a byte"
)
END_TOKEN = flags.DEFINE_string(
    "end_token", END_OF_TEXT, "the token of --tokenizer that ends a text"
)
for _class in (TrainSettings, Cadence):
    for _field in dataclasses.fields(_class):
        _define = {
            "int": flags.DEFINE_integer,
            "float": flags.DEFINE_float,
            "bool": flags.DEFINE_bool,
            "ComputeDtype": flags.DEFINE_string,
        }[str(_field.type)]
        _define(_field.name, _field.default, f"see {_class.__name__}")  # pyright: ignore
flags.FLAGS.set_default("model", "")  # a new one


def settings_of(cls: Any) -> Any:
    """The settings that the flags ask for."""
    return cls(**{f.name: flags.FLAGS[f.name].value for f in dataclasses.fields(cls)})


def make_start(seed: int) -> Start:
    """The model that the flags name, or a new one.

    Raises:
      ValueError: flags of a new model beside --model, or settings that it cannot have.
    """
    if cli.MODEL.value:
        for name in ("family", "sizes", "tokenizer", "end_token"):
            if flags.FLAGS[name].present:
                raise ValueError(f"--{name} is of a new model: it cannot go with --model")
        return existing_model(cli.MODEL.value, cache_dir=cli.CACHE_DIR.value)
    try:
        sizes = json.loads(SIZES.value)
    except json.JSONDecodeError as error:
        raise ValueError(f"--sizes={SIZES.value}: must be JSON: {error}") from error
    if not isinstance(sizes, dict):
        raise ValueError(f"--sizes={SIZES.value}: must be a JSON object")
    tokenizer = Tokenizer.load(TOKENIZER.value) if TOKENIZER.value else None
    return new_model(FAMILY.value, sizes, seed=seed, tokenizer=tokenizer, end_token=END_TOKEN.value)


def make_rows(start: Start, seq_len: int) -> tuple[TokenRows, TokenRows]:
    """The rows to learn and those to evaluate on."""
    end_id = start.eos_token_ids[0]

    def stream_of(paths: Sequence[str]) -> Any:
        documents = read_documents(paths, separator=SEPARATOR.value)
        vocab_size = start.config.spec.vocab_size
        return tokenize(documents, start.tokenizer, end_id=end_id, vocab_size=vocab_size)

    stream = stream_of(TEXT.value)
    if EVAL_TEXT.value:
        held_out, name = stream_of(EVAL_TEXT.value), "--eval_text"
    else:
        stream, held_out = split_off(stream, share=EVAL_SHARE.value, end_id=end_id)
        name = f"the held-out share of --text (--eval_share={EVAL_SHARE.value})"
    return TokenRows(stream, seq_len, "--text"), TokenRows(held_out, seq_len, name)


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}: files go into --text")
    if not TEXT.value:
        raise ValueError("no text: give --text")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    cli.enable_compilation_cache(cli.CACHE_DIR.value)
    console = Console(stderr=True)
    settings, cadence = settings_of(TrainSettings), settings_of(Cadence)
    start = make_start(settings.seed)
    rows, held_out = make_rows(start, settings.seq_len)
    run = Run(
        start=start,
        train=rows,
        held_out=held_out,
        settings=settings,
        cadence=cadence,
        out=Path(OUT.value),
    )
    console.print(
        f"{start.name}: {start.num_params:,} weights; {len(rows.stream):,} tokens to learn, "
        f"{len(held_out.stream):,} held out",
        highlight=False,
    )
    tokens_per_step = settings.batch_size * settings.seq_len
    with TrainingDisplay(
        console, num_steps=settings.num_steps, tokens_per_step=tokens_per_step
    ) as display:
        folder = train(run, display)
    print(folder)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
