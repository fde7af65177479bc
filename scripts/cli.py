"""What the command-line programs share: flags, the engine they make, and its table of figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import models.loading
from models.checkpoints import FetchError, cache_root
from models.stored import StoredModel
from paged_jax import (
    Engine,
    EngineConfig,
    Model,
    NgramSpeculation,
    RequestOutput,
    SamplingParams,
)
from paged_jax.pool import bytes_per_block

MODEL = flags.DEFINE_string(
    "model", "smollm2-135m-instruct", "a known model's name, or a .gguf file"
)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "weights and KV pool")
UNROLL = flags.DEFINE_bool(
    "unroll", False, "weights of its own for each layer: decodes faster, compiles longer"
)
CACHE_DIR = flags.DEFINE_string("cache_dir", None, "where converted weights live")


def define_engine_flags(*, max_num_seqs: int = 32) -> None:
    """Flags of ``EngineConfig``."""
    flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
    flags.DEFINE_integer("num_blocks", None, "blocks in the pool, the null block included")
    flags.DEFINE_integer("max_num_seqs", max_num_seqs, "most sequences in a step", lower_bound=1)
    flags.DEFINE_integer("max_model_len", None, "longest context; None: the model's own")
    flags.DEFINE_integer("max_num_batched_tokens", 512, "prompt tokens a step", lower_bound=1)
    flags.DEFINE_integer(
        "speculate", 0, "most draft tokens a step, by prompt lookup; 0: none", lower_bound=0
    )
    flags.DEFINE_bool(
        "prefix_cache", True, "compute no prompt's beginning that was computed before"
    )


def define_sampling_flags(*, max_tokens: int = 128, temperature: float = 0.0) -> None:
    """Flags of ``SamplingParams``."""
    flags.DEFINE_integer("n", 1, "answers to each prompt", lower_bound=1)
    flags.DEFINE_integer("max_tokens", max_tokens, "tokens to generate", lower_bound=1)
    flags.DEFINE_integer("beam_width", None, "beams of a beam search; None: none", lower_bound=1)
    flags.DEFINE_integer("min_tokens", 0, "tokens before an end token may come")
    flags.DEFINE_float("temperature", temperature, "0 is greedy")
    flags.DEFINE_integer("top_k", 0, "keep the k best tokens; 0: all")
    flags.DEFINE_float("top_p", 1.0, "keep the best tokens that reach this probability")
    flags.DEFINE_float("min_p", 0.0, "keep tokens this likely relative to the best")
    flags.DEFINE_float("repetition_penalty", 1.0, "over prompt and output")
    flags.DEFINE_float("presence_penalty", 0.0, "over the output")
    flags.DEFINE_float("frequency_penalty", 0.0, "over the output")
    flags.DEFINE_integer("seed", None, "the same tokens whatever else runs; None: drawn")
    flags.DEFINE_multi_string("stop", [], "text that ends the output; repeat for several")
    flags.DEFINE_bool("ignore_eos", False, "end tokens do not end the output")
    flags.DEFINE_integer("logprobs", None, "log-probabilities of this many best tokens")


def sampling_params() -> SamplingParams:
    """The parameters that the flags ask for."""
    names = ("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p")
    names += ("ignore_eos", "beam_width")
    names += ("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs")
    chosen: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    return SamplingParams(stop=tuple(flags.FLAGS.stop), **chosen)


def load_model(*, progress: bool = True) -> Model:
    """The model that the flags name, with compiled programs kept between runs."""
    return open_model(progress=progress).load(DTYPE.value, unroll=UNROLL.value)


def open_model(*, progress: bool = True) -> StoredModel:
    """The model that the flags name, its weights not read yet."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # what JAX and the ops log: --verbosity=0
    enable_compilation_cache(CACHE_DIR.value)
    return models.loading.open_model(MODEL.value, cache_dir=CACHE_DIR.value, progress=progress)


def make_engine(model: Model, **settings: Any) -> Engine:
    """The engine that the flags describe, but for ``settings``."""
    names = ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens")
    chosen: dict[str, Any] = {name: flags.FLAGS[name].value for name in (*names, "prefix_cache")}
    if flags.FLAGS.speculate:
        chosen["speculation"] = NgramSpeculation(num_draft_tokens=flags.FLAGS.speculate)
    return Engine(model, config=EngineConfig(**{"kv_dtype": DTYPE.value, **chosen, **settings}))


def enable_compilation_cache(cache_dir: str | None) -> None:
    """Keep compiled programs on disk, unless the user's environment says where already."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_root(cache_dir) / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def figures(
    engine: Engine, outputs: Sequence[RequestOutput], seconds: float
) -> list[tuple[str, str]]:
    """The table that ends a run: what was generated, and what the memory was used for.

    Args:
      engine: after the run.
      outputs: the last output of every request.
      seconds: wall time of the run.
    """
    stats, config, spec = engine.stats, engine.config, engine.model.spec
    completions = [(output, one) for output in outputs for one in output.outputs]
    generated = sum(len(completion.token_ids) for _, completion in completions)
    lengths = [len(out.prompt_token_ids) + len(one.token_ids) for out, one in completions]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    block = bytes_per_block(spec, block_size=config.block_size, dtype=config.kv_dtype)
    usable, peak = engine.num_blocks - 1, stats.peak_used_blocks

    def dense(positions: int) -> str:
        size = len(completions) * positions * (block // config.block_size)
        return f"{_size(size)}: {size / max(peak * block, 1):.1f} times that peak"

    accepted = f"{stats.num_accepted_tokens} of {stats.num_drafted_tokens} accepted"
    drafts = [("drafted tokens", accepted)] if config.speculation else []
    return [
        ("requests", f"{len(outputs)}"),
        ("tokens", f"{num_prompt} prompt ({num_cached} of them cached), {generated} generated"),
        ("tokens/s", f"{generated / seconds:.1f} generated ({seconds:.1f} s with compiling)"),
        *drafts,
        ("blocks used", f"{peak} of {usable} at the peak, {engine.num_used_blocks} now"),
        ("memory of those blocks", f"{_size(peak * block)} at the peak"),
        ("of it real tokens", f"{stats.block_utilisation:.1%} (all steps)"),
        ("the whole pool", _size(usable * block)),
        (f"dense, {spec.max_position} positions each (model's)", dense(spec.max_position)),
        (f"dense, {max(lengths)} positions each (longest)", dense(max(lengths))),
    ]


def print_figures(console: Console, rows: Sequence[tuple[str, str]], *, title: str) -> None:
    """Print a two-column table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Run a program's ``main``; what the user can mend ends it with one line, not a traceback."""

    def guarded(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except (ValueError, FetchError, OSError, MemoryError) as error:
            if isinstance(error, BrokenPipeError):  # `| head`: nobody reads on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(1)
            shown = str(error) or type(error).__name__
            print(f"error: {shown}", file=sys.stderr)
            sys.exit(2)

    app.run(guarded)
