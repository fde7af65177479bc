"""The floor tables of docs/kernels.md: `python -m paged_jax_scripts.gpu.floors docs/kernels.md`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.devices import A100, B200, H100, H200
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES, HeadShape
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.roofline import (
    Cost,
    attention_cost,
    block_copy_cost,
    kv_write_cost,
)

MODELS = ("llama3-8b", "llama3-70b/8", "smollm2", "gemma3-4b")
BATCHES, CONTEXTS = (1, 8, 32, 128), (512, 2048, 8192, 32768)
DEVICES = {"A100": A100, "H100": H100, "H200": H200, "B200": B200}
START, END = "<!-- floors: generated -->", "<!-- floors: end -->"


def _call(
    heads: HeadShape, batch: int, context: int, *, new: int = 1, kv_dtype: str = "bfloat16"
) -> AttentionCall:
    width = -(-context // 16)
    return AttentionCall(
        num_rows=batch,
        num_new=new,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=16,
        table_width=width,
        num_blocks=batch * width + 1,
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
    )


def _row(name: str, cost: Cost) -> str:
    ratio = cost.operations / cost.least_bytes
    floors = [f"{cost.floor_seconds(device) * 1e6:,.2f}" for device in DEVICES.values()]
    return f"| {name} | {cost.least_bytes / 1e6:,.2f} | {ratio:.1f} | {' | '.join(floors)} |"


def _table(head: str, rows: Iterator[str] | list[str]) -> str:
    names = f"| {head} | MB | operations a byte | {' | '.join(DEVICES)} |"
    return "\n".join([names, "|---" * (3 + len(DEVICES)) + "|", *rows])


def _decode_rows() -> Iterator[str]:
    for name in MODELS:
        for batch in BATCHES:
            for context in CONTEXTS:
                call = _call(HEAD_SHAPES[name], batch, context)
                yield _row(f"{name}, {batch} x {context}", attention_cost(call, [context] * batch))


def _other_rows() -> Iterator[str]:
    llama = HEAD_SHAPES["llama3-8b"]
    for context in (512, 2048, 8192, 32768):
        cost = attention_cost(_call(llama, 1, context, new=512), [context])
        yield _row(f"prefill: 512 new tokens of {context}", cost)
    for kv_dtype in ("int8", "float8_e4m3fn"):
        call = _call(llama, 32, 2048, kv_dtype=kv_dtype)
        yield _row(f"decode, {kv_dtype} pool, 32 x 2048", attention_cost(call, [2048] * 32))
    windowed = attention_cost(_call(llama, 32, 8192), [8192] * 32, window=1024)
    yield _row("decode, window 1024, 32 x 8192", windowed)
    for tokens in (32, 512):
        cost = kv_write_cost(_call(llama, 1, 2048), tokens)
        yield _row(f"kv_write: {tokens} tokens, one layer", cost)
    cost = block_copy_cost(_call(llama, 1, 2048), 16, num_layers=32)
    yield _row("block_copy: 16 blocks, 32 layers", cost)


def tables() -> str:
    """Both tables as Markdown; times in microseconds."""
    return "\n\n".join(
        [
            _table("decode: model, batch x context", _decode_rows()),
            _table("other calls, heads of llama3-8b", _other_rows()),
        ]
    )


def updated(page: str) -> str:
    """A page with the tables between its two markers replaced.

    Raises:
        ValueError: the page has no such markers.
    """
    if START not in page or END not in page:
        raise ValueError(f"the page must have the lines {START} and {END}")
    head, rest = page.split(START, 1)
    return f"{head}{START}\n\n{tables()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
