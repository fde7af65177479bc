"""`make demo`: real text from a real model, several prompts at once, out of one paged pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax_scripts import cli
from paged_jax_scripts.display import StreamDisplay
from paged_jax_scripts.pool_picture import PoolSnapshot, draw, take_snapshot

QUESTIONS = (
    "Why is the sky blue?",
    "Explain in two sentences what a hash table is.",
    "Write a haiku about a restaurant with modular tables.",
    "What is the capital of France, and which river runs through it?",
    "Give me three tips for learning to play chess.",
    "Translate 'good morning' into Spanish.",
    "Tell a very short story about a lighthouse keeper.",
    "List five animals that live in the sea.",
)
cli.define_engine_flags(max_num_seqs=8)
flags.DEFINE_integer("max_tokens", 96, "tokens to generate a prompt", lower_bound=1)
flags.FLAGS.set_default("num_blocks", 41)
flags.adopt_module_key_flags(cli)


def stream_with_picture(
    engine: Engine, prompts: Sequence[str], params: SamplingParams, console: Console
) -> tuple[list[RequestOutput], PoolSnapshot | None]:
    """Generate; return the last outputs and the pool as it was when most blocks were in use."""
    request_ids = engine.add_requests(prompts, params)
    numbers = {request_id: index for index, request_id in enumerate(request_ids)}
    final: dict[str, RequestOutput] = {}
    fullest: PoolSnapshot | None = None
    with StreamDisplay(console, QUESTIONS, enabled=True, separator="\n") as display:
        for output in engine.run(request_ids):
            display.update(numbers[output.request_id], output)
            if output.finished:
                final[output.request_id] = output
            if fullest is None or engine.num_used_blocks > len(fullest.owners):
                fullest = take_snapshot(engine, numbers)
    return [final[request_id] for request_id in request_ids], fullest


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    del argv
    console = Console()
    model = cli.load_model()
    engine = cli.make_engine(model)
    tokenizer = model.tokenizer
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}])  # pyright: ignore
        for question in QUESTIONS
    ]
    params = SamplingParams(temperature=0.0, max_tokens=flags.FLAGS.max_tokens)
    begin = time.perf_counter()
    outputs, fullest = stream_with_picture(engine, prompts, params, console)
    seconds = time.perf_counter() - begin
    if fullest is not None:
        console.print(
            "\nThe pool when it was fullest: one cell a block of "
            f"{fullest.block_size} tokens, one letter a request, small where partly filled:"
        )
        console.print(draw(fullest, columns=40))
        console.print()
    cli.print_figures(console, cli.figures(engine, outputs, seconds), title=model.name)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
