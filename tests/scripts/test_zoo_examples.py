"""The examples of other people's models, and those of their page, run as printed."""

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations_zoos.md"


def require(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip("extra zoo")


@pytest.mark.parametrize(
    ("name", "package"), [("transformers_flax", "transformers"), ("gemma", "gemma")]
)
def test_the_toy(run_program, name, package):
    require(package)
    result = run_program(f"examples.{name}", "--max_tokens=5", is_toy=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [len(line.split(",")) for line in lines] == [5, 5, 5]


def test_a_checkpoint_of_gemma_needs_its_tokenizer(run_program):
    require("gemma")
    result = run_program("examples.gemma", "--folder=nowhere", is_toy=False)
    assert result.returncode != 0
    assert "--tokenizer=None must be the file tokenizer.model" in result.stderr


def test_a_folder_of_transformers(run_program, tmp_path):
    require("transformers")
    import tokenizers
    import transformers

    from paged_jax_scripts.examples.transformers_flax import toy_model

    toy_model().save_pretrained(tmp_path)
    words = {"[UNK]": 0, "once": 1, "upon": 2} | {f"w{i}": i for i in range(3, 64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    flags = [f"--folder={tmp_path}", "--prompt=once upon w7", "--prompt=w9", "--max_tokens=4"]
    result = run_program("examples.transformers_flax", *flags, is_toy=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()[-2:]
    assert all(set(line.split()) <= set(words) for line in lines)


@pytest.mark.parametrize("package", ["transformers", "gemma"])
def test_examples_of_the_page(package):
    require(package)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if f"from {package} import" in block)
    names: dict = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert len(names["outputs"]) == 2
    assert all(len(output.token_ids) == 20 for output in names["outputs"])
