"""The examples of docs/prefix_cache.md run as printed."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "prefix_cache.md"


def test_examples_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert results.attempted > 15
    assert results.failed == 0
