"""Generate text from prompts: flags, a file or standard input in; text or JSON lines out.

paged-jax-generate --prompt "The capital of France is" --prompt "Water boils at"
paged-jax-generate --chat --prompt "Why is the sky blue?"
paged-jax-generate --prompt_file prompts.txt --json > out.jsonl
cat prompts.txt | paged-jax-generate --prompt_file - --json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from paged_jax import Engine, Model, RequestOutput
from paged_jax_scripts import cli
from paged_jax_scripts.display import StreamDisplay

PROMPTS = flags.DEFINE_multi_string("prompt", [], "a prompt; repeat for several")
PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    "a file with one prompt a line (JSON strings allowed); - for standard input",
)
CHAT = flags.DEFINE_bool("chat", False, "put each prompt in the model's chat template")
SYSTEM = flags.DEFINE_string("system", None, "a system message for --chat")
CACHE_SALT = flags.DEFINE_string(
    "cache_salt", None, "share cached prefixes with nobody who has another salt"
)
JSON = flags.DEFINE_bool("json", False, "write one JSON line a request, as each ends")
STREAM = flags.DEFINE_bool(
    "stream", True, "on a terminal, show text as it comes; otherwise each text when it ends"
)
FIGURES = flags.DEFINE_bool("figures", True, "end with a table of figures on standard error")
cli.define_engine_flags()
cli.define_sampling_flags()
flags.adopt_module_key_flags(cli)


def read_prompts() -> list[str]:
    """All prompts that the flags name, in order.

    Raises:
      ValueError: there is none, or a line of the file is not valid.
    """
    prompts = list(PROMPTS.value)
    if PROMPT_FILE.value is not None:
        prompts += _read_lines(PROMPT_FILE.value)
    if not prompts:
        raise ValueError("no prompt: give --prompt, or --prompt_file (- for standard input)")
    return prompts


def _read_lines(path: str) -> list[str]:
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        # Lines end at newlines only: other separators are text. A byte order mark is not.
        lines = data.decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file={path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if not line.startswith('"'):
            prompts.append(line)
            continue
        try:
            prompts.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not a JSON string: {error}") from error
    return prompts


def as_chat(model: Model, prompts: Sequence[str], system: str | None) -> list[str]:
    """Each prompt as the user's turn of the model's chat template.

    Raises:
      ValueError: the model has no chat template.
    """
    render = getattr(model.tokenizer, "apply_chat_template", None)
    if render is None:
        raise ValueError(f"--chat: {model.name} has no chat template")
    first = [] if system is None else [{"role": "system", "content": system}]
    return [render([*first, {"role": "user", "content": prompt}]) for prompt in prompts]


def as_json(index: int, output: RequestOutput) -> str:
    """One line: the request's place among the prompts, its text and tokens, how it ended.

    With several answers, the first one's; all are in ``outputs``.
    """
    record = {
        "index": index,
        "text": output.text,
        "token_ids": output.token_ids,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["logprobs"] = [
            {"token_id": e.token_id, "logprob": e.logprob, "rank": e.rank, "top": e.top}
            for e in output.logprobs
        ]
    if len(output.outputs) > 1:
        names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
        record["outputs"] = [{name: getattr(one, name) for name in names} for one in output.outputs]
    return json.dumps(record, ensure_ascii=False)


def run_prompts(
    engine: Engine, texts: Sequence[str], prompts: Sequence[str], console: Console
) -> list[RequestOutput]:
    """Generate, show or write what comes, and return each text's last output, in order.

    ``prompts`` are what is shown: ``texts`` may have a chat template around them.
    """
    params = cli.sampling_params()
    request_ids = engine.add_requests(texts, params, cache_salt=CACHE_SALT.value)
    numbers = {request_id: index for index, request_id in enumerate(request_ids)}
    final: dict[str, RequestOutput] = {}
    separator = "\n" if CHAT.value else ""
    with StreamDisplay(
        console,
        prompts,
        enabled=not JSON.value,
        is_live=STREAM.value,
        separator=separator,
    ) as display:
        for output in engine.run(request_ids):
            index = numbers[output.request_id]
            display.update(index, output)
            if not output.finished:
                continue
            final[output.request_id] = output
            if JSON.value:
                print(as_json(index, output), flush=True)
    return [final[request_id] for request_id in request_ids]


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}: prompts go into --prompt")
    if SYSTEM.value is not None and not CHAT.value:
        raise ValueError("--system needs --chat")
    console = Console(stderr=True)
    prompts = read_prompts()
    model = cli.load_model()
    texts = as_chat(model, prompts, SYSTEM.value) if CHAT.value else prompts
    engine = cli.make_engine(model)
    begin = time.perf_counter()
    outputs = run_prompts(engine, texts, prompts, console if JSON.value else Console())
    if FIGURES.value:
        rows = cli.figures(engine, outputs, time.perf_counter() - begin)
        cli.print_figures(console, rows, title=model.name)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
