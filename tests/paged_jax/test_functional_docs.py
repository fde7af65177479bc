"""The blocks of docs/functional.md run as printed, in their order."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "functional.md"


def test_blocks_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, object] = {}
    for index, block in enumerate(blocks):
        exec(compile(block, f"functional.md, block {index}", "exec"), names)
