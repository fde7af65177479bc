"""The blocks of docs/integrations.md run as printed, in their order."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"


def test_blocks_of_the_page(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for index, block in enumerate(blocks):
        exec(compile(block, f"integrations.md, block {index}", "exec"), names)
    printed = [eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(tokens) for tokens in printed] == [6] * 4
    yours = [block for block in blocks if "as_model(" in block]
    assert len(yours) == 5
    assert all(len([line for line in block.splitlines() if line]) <= 14 for block in yours)
