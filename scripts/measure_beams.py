"""Blocks that sharing saves: beam search beside parallel sampling, on the same prompts.

The saving is blocks saved / blocks without sharing (paper section 6.3, Fig. 15): of all steps'
table entries, the share that is no block of its own.

python -m paged_jax_scripts.measure_beams --max_tokens=128
python -m paged_jax_scripts.measure_beams --prompts=prompts.jsonl --num_prompts=8
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, EngineConfig, Model, SamplingParams
from paged_jax.prompts import encode_prompt
from paged_jax_scripts import cli

PROMPTS = flags.DEFINE_string(
    "prompts", None, "JSON lines, each a prompt or an object with one; None: six built-in ones"
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", None, "of them; None: all", lower_bound=1)
WIDTHS = flags.DEFINE_multi_integer("width", [2, 4, 6], "beams, and samples", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "tokens to generate", lower_bound=1)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
CHAT = flags.DEFINE_bool(
    "chat", True, "put each prompt in the model's chat template, if it has one"
)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)

# Percent saved in the paper's Fig. 15, by width; beams on ShareGPT are given as a range only.
PAPER_ALPACA = {2: (6.09, 37.56), 4: (8.53, 53.13), 6: (9.79, 55.16)}
PAPER_SHAREGPT = {2: (16.2, 44.3), 6: (30.5, 66.3)}

BUILT_IN = (
    "Explain to a child why the sky is blue in the day and red in the evening.",
    "Write three sentences about a lighthouse keeper who finds a letter in a bottle.",
    "List the steps to repair a flat bicycle tyre, with the tools that are needed.",
    "What is the difference between a virus and a bacterium?",
    "Translate into plain English: the party of the first part shall indemnify the second.",
    "Our team meets on Mondays. Write a short, polite message that moves the meeting to Tuesday.",
)


@dataclasses.dataclass(slots=True)
class Saving:
    """Sums over the steps of a run.

    Attributes:
      saved: table entries that are no block of their own.
      entries: table entries: the blocks that would be held without sharing.
      copied: blocks copied on write.
      generated: tokens given back.
    """

    saved: int = 0
    entries: int = 0
    copied: int = 0
    generated: int = 0

    @property
    def share(self) -> float:
        """Blocks saved / blocks without sharing."""
        return self.saved / self.entries if self.entries else 0.0


def read_prompts(path: str | None, model: Model, *, chat: bool) -> list[str]:
    """The prompts of a file, or the built-in ones, in the chat template where there is one.

    Raises:
      ValueError: a line holds no prompt.
    """
    prompts: list[str] = list(BUILT_IN)
    if path is not None:
        with open(path, encoding="utf-8") as file:
            prompts = [_prompt_of(json.loads(line), path) for line in file if line.strip()]
    tokenizer: Any = model.tokenizer
    if not chat or getattr(tokenizer, "chat_template", None) is None:
        return prompts
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]


def _prompt_of(record: object, path: str) -> str:
    found = record
    if isinstance(record, dict):
        found = next((record[name] for name in ("prompt", "text") if name in record), None)
    if not isinstance(found, str):
        raise ValueError(
            f"--prompts={path}: {record!r} must be a string or hold 'prompt' or 'text'"
        )
    return found


def measure(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> Saving:
    """Run all prompts together; look at the tables after every step."""
    engine.stats.reset()
    engine.add_requests(list(prompts), params)
    saving = Saving()
    while engine.has_unfinished:
        engine.step()
        stats = engine.block_manager.stats()
        saving.saved += stats.saved
        saving.entries += stats.saved + stats.used
    saving.copied = engine.stats.num_copied_blocks
    saving.generated = engine.stats.num_output_tokens
    return saving


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    model = cli.load_model()
    prompts = read_prompts(PROMPTS.value, model, chat=CHAT.value)[: NUM_PROMPTS.value]
    longest = max(len(encode_prompt(prompt, model)) for prompt in prompts)
    config = EngineConfig(
        block_size=BLOCK_SIZE.value,
        max_num_seqs=max(WIDTHS.value) * len(prompts),
        max_model_len=min(longest + MAX_TOKENS.value, model.spec.max_position),
        kv_dtype=cli.DTYPE.value,
    )
    engine = Engine(model, config=config)
    console = Console()
    table = Table(
        "width", "parallel", "beams", "paper: Alpaca", "paper: ShareGPT", "copied", "tokens",
        title=f"Blocks saved / without sharing, {len(prompts)} prompts", title_justify="left",
    )  # fmt: skip
    results = {}
    for width in WIDTHS.value:
        with console.status(f"width {width}"):
            sampled = SamplingParams(n=width, max_tokens=MAX_TOKENS.value, seed=0)
            searched = SamplingParams(beam_width=width, max_tokens=MAX_TOKENS.value)
            parallel, beams = (measure(engine, prompts, one) for one in (sampled, searched))
        results[width] = {"parallel": parallel, "beams": beams}
        table.add_row(
            str(width), f"{parallel.share:.1%}", f"{beams.share:.1%}",
            _paper(PAPER_ALPACA, width), _paper(PAPER_SHAREGPT, width),
            f"{parallel.copied}, {beams.copied}", f"{parallel.generated}, {beams.generated}",
        )  # fmt: skip
    console.print(table)
    if JSON_FILE.value:
        figures = {
            width: {
                kind: {"share": one.share, **dataclasses.asdict(one)} for kind, one in kinds.items()
            }
            for width, kinds in results.items()
        }
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def _paper(figures: dict[int, tuple[float, float]], width: int) -> str:
    return "{}, {} %".format(*figures[width]) if width in figures else ""


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
