"""The README's Python blocks run as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run_block(index):
    exec(compile(python_blocks()[index], f"README.md, block {index}", "exec"), {})


@pytest.mark.weights
def test_library_example(smollm2, capsys):
    del smollm2  # fetched, or skipped
    block = python_blocks()[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    run_block(0)
    shown = capsys.readouterr().out
    assert "' Paris.' stop" in shown
    assert "free=255" in shown


@pytest.mark.weights
def test_parallel_sampling_example(smollm2, capsys):
    del smollm2
    run_block(1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert len({line[2:] for line in lines}) == 3


@pytest.mark.weights
def test_beam_search_example(smollm2, capsys):
    del smollm2
    run_block(2)
    first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert 0 > float(first[0]) >= float(second[0])
    assert first[1:] != second[1:]


@pytest.mark.weights
def test_registered_prefix_example(smollm2, capsys):
    del smollm2
    run_block(3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["16", "of"]] * 2


def test_own_model_example(capsys):
    run_block(4)
    token_lists = eval(capsys.readouterr().out)
    assert [len(tokens) for tokens in token_lists] == [16, 16]


def test_a_model_from_somewhere_else(capsys):
    block = python_blocks()[5]
    ours = block[block.index("from paged_jax") :]
    assert len([line for line in ours.splitlines() if line.strip()]) <= 10
    namespace = {}
    exec(compile(block, "README.md, block 5", "exec"), namespace)
    token_lists = [eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(tokens) for tokens in token_lists] == [6, 6]
    # What the model says of the whole text, without any cache.
    tokens = [1, 2, 3, 4, 5, *token_lists[0]]
    ids, positions = (namespace["jnp"].asarray([values]) for values in (tokens, range(len(tokens))))
    logits = namespace["module"].apply(namespace["params"], ids, positions)[0]
    assert logits[4:-1].argmax(-1).tolist() == tokens[5:]


@pytest.mark.weights
def test_dense_engine_example(smollm2, capsys):
    del smollm2
    run_block(6)
    same, numbers = capsys.readouterr().out.rsplit("] ", 1)
    assert same == "[True, True, True"
    num_bytes, blocks = int(numbers.split()[0]), int(numbers.split("held ")[1].split()[0])
    assert num_bytes == 3 * 256 * 2 * 30 * 3 * 64 * 4
    assert blocks == 3
