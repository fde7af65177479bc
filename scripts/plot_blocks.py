"""Draws block tables, sharing and copies of a small run: as text, and as an SVG picture.

    python scripts/plot_blocks.py --example=fig8 --svg=fig8.svg

Every step is a picture of its own: left the block tables, right the pool. A block has the colour of
the sequence that holds it, and stripes and a count when several do; the bar below says how far it
is filled; an arrow is a copy. The examples are those of docs/blocks.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path

from absl import app, flags

from paged_jax.blocks.block_manager import BlockCopy, BlockManager
from paged_jax.blocks.namespace import Namespace

COLOURS = ("#7fb3d5", "#f5b041", "#82c99a", "#e59866", "#bb8fce", "#f1948a", "#73c6b6", "#d4ac0d")
CELL, GAP, COLUMNS = 52, 10, 8  # pixels, pixels, blocks a row of the pool
LABEL_WIDTH, CAPTION_HEIGHT = 90, 44  # pixels


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """A pool block as drawn.

    Attributes:
      holders: places of its sequences in ``Frame.tables``.
      num_filled: positions that hold a token.
    """

    holders: tuple[int, ...]
    num_filled: int


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Tables and pool at one moment.

    Attributes:
      caption: what happened.
      tables: blocks of each sequence, by its name.
      holdings: who holds each block that is not free.
      num_usable: blocks of the pool, the null block left out.
      block_size: token positions a block.
      copies: block copies of this step.
    """

    caption: str
    tables: Mapping[str, tuple[int, ...]]
    holdings: Mapping[int, Holding]
    num_usable: int
    block_size: int
    copies: tuple[BlockCopy, ...] = ()


def take_frame(manager: BlockManager, names: Mapping[int, str], caption: str) -> Frame:
    """Look at the sequences that have a table.

    Args:
      manager: at any moment; its copies are those of the step so far.
      names: by sequence id; the order picks the colours.
      caption: what happened.
    """
    size = manager.block_size
    tables: dict[str, tuple[int, ...]] = {}
    holders: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    for number, (seq_id, name) in enumerate(names.items()):
        blocks = manager.table_array(seq_id).tolist() if manager.has_table(seq_id) else []
        tables[name] = tuple(blocks)
        for place, block in enumerate(blocks):
            if block:
                here = min(manager.num_tokens(seq_id) - place * size, size)
                holders.setdefault(block, []).append(number)
                filled[block] = max(filled.get(block, 0), here)
    holdings = {block: Holding(tuple(who), filled[block]) for block, who in holders.items()}
    return Frame(caption, tables, holdings, manager.num_usable, size, manager.step_copies)


def figure_6() -> Iterator[Frame]:
    """One request, block by block."""
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=[7, 1, 3, 5, 2, 4, 6, 8])
    names = {0: "request A"}
    manager.allocate(0, num_tokens=7)
    yield take_frame(manager, names, "The prompt: Four score and seven years ago our")
    for word in ("fathers: fits", "brought: a new block"):
        manager.begin_step()
        manager.append(0)
        yield take_frame(manager, names, word)


def figure_7() -> Iterator[Frame]:
    """Two requests that share nothing."""
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=[7, 1, 5, 2, 3, 4, 6, 8])
    names = {0: "request A", 1: "request B"}
    manager.allocate(0, num_tokens=7)
    manager.allocate(1, num_tokens=5)
    yield take_frame(manager, names, "Two prompts")
    for _ in range(2):
        manager.begin_step()
        manager.append(0)
        manager.append(1)
    yield take_frame(manager, names, "Two tokens later")


def figure_8() -> Iterator[Frame]:
    """Two answers to one prompt."""
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=[7, 1, 3, 2, 4, 5, 6, 8])
    names = {0: "answer A", 1: "answer B"}
    manager.allocate(0, num_tokens=7)
    manager.fork(0, 1)
    yield take_frame(manager, names, "Two answers to one prompt share its blocks")
    manager.begin_step()
    manager.append(0)
    yield take_frame(manager, names, "A writes: the half-filled block is copied for it")
    manager.append(1)
    yield take_frame(manager, names, "B writes in place: it is the last holder")


def figure_9() -> Iterator[Frame]:
    """Beam search of width 4; the figure's block 0 is block 13 here."""
    manager = BlockManager(num_blocks=14, block_size=4, free_blocks=[13, *range(1, 13)])
    manager.allocate(0, num_tokens=4)
    manager.fork(0, 3)
    for children, beams in (((), (0, 3)), ((), (0, 3)), ((1, 2), (0, 1, 2, 3))):
        for child in children:
            manager.fork(0, child)
        manager.begin_step()
        for beam in beams:
            manager.append(beam, num_tokens=4)
    manager.begin_step()
    names = {beam: f"beam {beam}" for beam in range(4)}
    yield take_frame(manager, names, "Four beams, four full blocks each")
    manager.fork(1, 4)
    manager.fork(2, 5)
    for beam in (1, 4, 2, 5):
        manager.append(beam)
    manager.free(0)
    manager.free(3)
    names = {1: "1, first", 4: "1, second", 2: "2, first", 5: "2, second"}
    yield take_frame(manager, names, "Beams 1 and 2 have two successors each: 2, 4, 5, 8 are free")


def prefix() -> Iterator[Frame]:
    """A prompt that begins as a cached one does."""
    manager = BlockManager(num_blocks=9, block_size=4)
    names = {0: "first", 1: "second"}
    manager.allocate(0, num_tokens=11)
    manager.begin_step()
    tokens = list(range(11))
    manager.publish(0, Namespace(), tokens)
    yield take_frame(manager, names, "A prompt of 11 tokens; blocks 1 and 2 are published")
    prompt = [*tokens[:7], 90, 91]
    match = manager.lookup(Namespace(), prompt)
    manager.allocate(1, num_tokens=len(prompt), prefix=match)
    caption = f"A second prompt begins alike: {match.num_tokens} of its 9 tokens are not computed"
    yield take_frame(manager, names, caption)


EXAMPLES: dict[str, Callable[[], Iterator[Frame]]] = {
    "fig6": figure_6,
    "fig7": figure_7,
    "fig8": figure_8,
    "fig9": figure_9,
    "prefix": prefix,
}


def draw_text(frame: Frame) -> str:
    """A frame for a terminal: tables, then each block with its holders' letters and filling."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    lines = [frame.caption]
    width = max(map(len, frame.tables))
    for number, (name, blocks) in enumerate(frame.tables.items()):
        cells = " ".join(f"{block:>2}" if block else " ." for block in blocks)
        lines.append(f"  {letters[number % 26]} {name:<{width}}  {cells}".rstrip())
    cells = []
    for block in range(1, frame.num_usable + 1):
        holding = frame.holdings.get(block)
        who = "".join(letters[i % 26] for i in holding.holders) if holding else "-"
        level = f" {holding.num_filled}/{frame.block_size}" if holding else ""
        count = f" x{len(holding.holders)}" if holding and len(holding.holders) > 1 else ""
        cells.append(f"{block:>2}[{who}{level}{count}]")
    for begin in range(0, len(cells), COLUMNS):
        lines.append("  " + " ".join(cells[begin : begin + COLUMNS]))
    lines += [f"  copy {copy.src} -> {copy.dst}" for copy in frame.copies]
    return "\n".join(lines)


def draw_svg(frames: list[Frame]) -> str:
    """All frames, one below the other, as an SVG document."""
    longest = max(max(map(len, frame.tables.values()), default=0) for frame in frames)
    pool_x = LABEL_WIDTH + longest * CELL + 5 * GAP
    width = pool_x + COLUMNS * (CELL + GAP) + GAP
    parts, y = [], 0
    for frame in frames:
        parts.append(f'<text x="{GAP}" y="{y + 26}" class="caption">{escape(frame.caption)}</text>')
        top = y + CAPTION_HEIGHT
        parts += _svg_tables(frame, top)
        parts += _svg_pool(frame, pool_x, top)
        rows = max(len(frame.tables), -(-frame.num_usable // COLUMNS))
        y = top + rows * (CELL + GAP) + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="14">'
        "<style>.caption{font-size:16px;font-weight:bold}.id{text-anchor:middle}"
        ".count{font-size:11px;text-anchor:end}</style>"
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="#c0392b"/></marker></defs>'
        f'<rect width="{width}" height="{y}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _svg_tables(frame: Frame, top: int) -> Iterator[str]:
    for row, (name, blocks) in enumerate(frame.tables.items()):
        y = top + row * (CELL + GAP)
        yield f'<text x="{GAP}" y="{y + 30}">{escape(name)}</text>'
        for place, block in enumerate(blocks):
            x = LABEL_WIDTH + place * CELL
            colour = COLOURS[row % len(COLOURS)] if block else "#eeeeee"
            yield (
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL - 12}" fill="{colour}" '
                'stroke="#444"/>'
                f'<text x="{x + CELL // 2}" y="{y + 26}" class="id">{block or "hole"}</text>'
            )


def _svg_pool(frame: Frame, left: int, top: int) -> Iterator[str]:
    def corner(block: int) -> tuple[int, int]:
        row, column = divmod(block - 1, COLUMNS)
        return left + column * (CELL + GAP), top + row * (CELL + GAP)

    for block in range(1, frame.num_usable + 1):
        x, y = corner(block)
        holding = frame.holdings.get(block)
        dash = "" if holding else ' stroke-dasharray="4 3"'
        if holding:
            yield from _svg_stripes(holding, x, y)
            filled = (CELL - 8) * holding.num_filled // frame.block_size
            yield (
                f'<rect x="{x + 4}" y="{y + CELL - 10}" width="{CELL - 8}" height="6" '
                'fill="white" stroke="#444" stroke-width="0.5"/>'
                f'<rect x="{x + 4}" y="{y + CELL - 10}" width="{filled}" height="6" fill="#444"/>'
            )
            if len(holding.holders) > 1:
                count = len(holding.holders)
                yield f'<text x="{x + CELL - 3}" y="{y + 12}" class="count">x{count}</text>'
        yield (
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="none" '
            f'stroke="#444"{dash}/>'
            f'<text x="{x + CELL // 2}" y="{y + 31}" class="id">{block}</text>'
        )
    for copy in frame.copies:
        (x0, y0), (x1, y1) = corner(copy.src), corner(copy.dst)
        half = CELL // 2
        middle = (x0 + x1) // 2 + half, min(y0, y1) - 24
        yield (
            f'<path d="M{x0 + half} {y0} Q{middle[0]} {middle[1]} {x1 + half} {y1}" fill="none" '
            'stroke="#c0392b" stroke-width="2.5" marker-end="url(#tip)"/>'
        )


def _svg_stripes(holding: Holding, x: int, y: int) -> Iterator[str]:
    """Upright stripes, twice each holder's colour; one holder: a plain square."""
    num_stripes = 2 * len(holding.holders) if len(holding.holders) > 1 else 1
    for stripe in range(num_stripes):
        colour = COLOURS[holding.holders[stripe % len(holding.holders)] % len(COLOURS)]
        begin = x + CELL * stripe // num_stripes
        end = x + CELL * (stripe + 1) // num_stripes
        yield f'<rect x="{begin}" y="{y}" width="{end - begin}" height="{CELL}" fill="{colour}"/>'


_EXAMPLE = flags.DEFINE_enum("example", "fig8", [*EXAMPLES], "what to draw")
_SVG = flags.DEFINE_string("svg", None, "write the picture here; none: text only")


def main(argv: list[str]) -> None:
    """Draw one example."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    frames = list(EXAMPLES[_EXAMPLE.value]())
    print("\n\n".join(map(draw_text, frames)))
    if _SVG.value:
        Path(_SVG.value).write_text(draw_svg(frames), encoding="utf-8")
        print(f"\n{_SVG.value}: {len(frames)} pictures", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
