import re
import xml.etree.ElementTree as ElementTree

import pytest

from paged_jax.blocks.block_manager import BlockManager
from paged_jax_scripts.plot_blocks import COLOURS, EXAMPLES, draw_svg, draw_text, take_frame

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", [*EXAMPLES])
def test_every_example_is_a_picture_and_a_text(name):
    frames = list(EXAMPLES[name]())
    root = ElementTree.fromstring(draw_svg(frames))
    texts = [node.text or "" for node in root.iter(f"{SVG}text")]
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("marker-end")]
    assert len(arrows) == sum(len(frame.copies) for frame in frames)
    for frame in frames:
        assert frame.caption in texts
        assert draw_text(frame).startswith(frame.caption)
        assert set(frame.tables) <= set(texts)
    shared = [f"x{len(h.holders)}" for f in frames for h in f.holdings.values() if h.holders[1:]]
    assert sorted(shared) == sorted(text for text in texts if re.fullmatch(r"x\d+", text))


def test_two_answers_to_one_prompt_as_text():
    texts = [draw_text(frame) for frame in EXAMPLES["fig8"]()]
    assert "  A answer A   7  1\n  B answer B   7  1\n" in texts[0]
    assert " 1[AB 3/4 x2]" in texts[0]
    assert " 7[AB 4/4 x2]" in texts[1]
    assert texts[1].endswith("  copy 1 -> 3")
    assert " 1[B 4/4]" in texts[2]
    assert " 3[A 4/4]" in texts[2]


def test_stripes_and_holes():
    manager = BlockManager(num_blocks=4, block_size=2)
    manager.allocate(0, num_tokens=4)
    manager.drop_before(0, 2)
    manager.fork(0, 1)
    frame = take_frame(manager, {0: "a<b", 1: "c"}, "x")
    assert frame.tables == {"a<b": (0, 2), "c": (0, 2)}
    svg = draw_svg([frame])
    assert "a&lt;b" in svg
    assert svg.count(">hole<") == 2
    for colour in COLOURS[:2]:
        assert svg.count(f'fill="{colour}"') == 1 + 2  # the table's cell, two stripes
    assert "  A a<b   .  2" in draw_text(frame)


def test_program(run_program, tmp_path):
    path = tmp_path / "fig9.svg"
    result = run_program("plot_blocks", "--example=fig9", f"--svg={path}", is_toy=False)
    assert result.returncode == 0, result.stderr
    assert "13[ABCD 4/4 x4]" in result.stdout
    assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"
    result = run_program("plot_blocks", "stray", is_toy=False)
    assert result.returncode != 0
    assert "unexpected arguments" in result.stdout + result.stderr
