"""Models of some hundred megabytes, and the most memory that a process takes to use them."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
from suites.toy_gguf import TOY_TOKENS, toy_metadata, write_toy_gguf

from models.checkpoints.gguf_reader import GgufFile
from models.checkpoints.safetensors_writer import write_shards
from models.common.weights import Weight
from models.llama import LlamaConfig
from models.llama.gguf import tensors_from_gguf
from models.llama.params import weights

# In the shares of a usual model, and with most of the weights in one table as in Gemma 3 270M.
LAYERED = LlamaConfig(
    vocab_size=16_000, hidden_size=1_024, intermediate_size=4_096, num_layers=5, num_heads=16,
    num_kv_heads=16, head_dim=64, max_position=128, tie_embeddings=True,
)  # fmt: skip
MOSTLY_TABLE = LlamaConfig(
    vocab_size=80_000, hidden_size=1_024, intermediate_size=2_048, num_layers=2, num_heads=16,
    num_kv_heads=4, head_dim=64, max_position=128, tie_embeddings=True,
)  # fmt: skip

_MEASURE = """
    import json, pathlib, re, sys, jax
    from models.conversion import convert
    from models.loading import load_model

    small, big, scratch, use = sys.argv[1:]

    def run(source, target):
        if use == "load":
            model = load_model(source, cache_dir=target, progress=False)
            return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        convert(source, target, to=use)

    def peak():  # ru_maxrss would begin with that of the parent process
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])

    run(small, scratch + "/small")
    before = peak()
    size = run(big, scratch + "/big")
    print(json.dumps({"peak": peak() - before, "size": size}))
"""


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    table: list[Weight] = weights(config)
    return {
        name: shape
        for weight in table
        for index in weight.indices()
        for name, shape, _ in weight.tensors_at(index)
    }


def write_hf(folder: Path, config: LlamaConfig) -> Path:
    """A Hugging Face folder; the values repeat, so that it is made quickly."""
    shapes = shapes_of(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    tensors = ((name, _values(shape)) for name, shape in shapes.items())
    write_shards(folder, tensors, shapes, np.dtype(np.float32), max_shard_bytes=10**9)
    return folder


def write_gguf(path: Path, config: LlamaConfig) -> Path:
    """A GGUF file of float16 tensors, which become twice as large."""

    names = tensors_from_gguf(GgufFile(write_toy_gguf(path.with_suffix(".toy"))), config)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in toy_metadata(config).items():
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
    assert config.vocab_size >= len(TOY_TOKENS)
    for name, shape in shapes_of(config).items():
        kind = np.float16 if len(shape) == 2 else np.float32
        writer.add_tensor(names.stored_name(name), _values(shape).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _values(shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.random.default_rng(0).standard_normal(100_003, np.float32), shape)


def peak_share(small: Path, big: Path, scratch: Path, *, use: str, size: int) -> float:
    """Memory that a process takes beyond what a small model takes, as a share of the weights'.

    Args:
      small: a model that is used first: imports and compiled code are not counted.
      big: the model that is measured.
      scratch: an empty folder.
      use: 'load', or the format to convert to.
      size: bytes of the weights.
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE), small, big, scratch, use],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["size"] in (size, None)
    return result["peak"] / size
