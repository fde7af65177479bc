"""Small models of Hugging Face's formats with random weights, and transformers' logits on them.

`make hf-goldens` makes the files anew (scripts/hf/make_goldens.py).
"""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parents[1] / "data" / "hf"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Golden:
    """One case.

    Attributes:
      config: config.json as transformers saves it.
      shapes: of the tensors that it saves.
      tokens: of one sequence.
      logits: at each of them, ``[T, V]``.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    tokens: np.ndarray
    logits: np.ndarray

    @classmethod
    def load(cls, name: str) -> "Golden":
        with np.load(DATA / f"{name}.npz") as stored:
            meta = json.loads(str(stored["meta"]))
            shapes = {key: tuple(shape) for key, shape in meta["tensors"].items()}
            return cls(meta["config"], shapes, stored["tokens"], stored["logits"])

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: draw(name, shape) for name, shape in self.shapes.items()}

    def write_folder(self, folder: Path, *, num_shards: int = 2, **changes: Any) -> Path:
        """A Hugging Face folder of this model; ``changes`` go into config.json."""
        tensors = self.tensors()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | changes))
        names = sorted(tensors)
        weight_map = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::num_shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """As scripts/hf/make_goldens.py draws, which cannot be imported here: it needs torch."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        return (0.1 * noise + (not name.endswith("bias"))).astype(np.float32)
    return (noise * shape[-1] ** -0.5).astype(np.float32)
