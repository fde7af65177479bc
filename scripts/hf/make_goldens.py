"""Logits of Hugging Face transformers (torch, CPU, float32) on small models with random weights.

Needs torch, transformers and safetensors, and nothing of this project (`make hf-goldens`). For each
case of tests/data/hf/cases.json it writes CASE.npz: the config.json that transformers saves, names
and shapes of the tensors that it saves, the tokens, and the logits of all of them. The weights are
not stored: `suites.hf_golden` draws the same from their names.

    python scripts/hf/make_goldens.py [--check] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors import safe_open
from safetensors.numpy import save_file

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "hf"
_NUM_TOKENS = 75  # 25 of the prompt, 50 that are decoded
_TOLERANCE = 1e-4


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a tensor, by its name and shape, as in tests/suites/hf_golden.py."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        return (0.1 * noise + (not name.endswith("bias"))).astype(np.float32)
    return (noise * shape[-1] ** -0.5).astype(np.float32)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a case."""
    config = getattr(transformers, case["class"])(**case["config"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        files = sorted(folder.glob("*.safetensors"))
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
            file.unlink()
        weights = {name: draw(name, shape) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokens = np.random.default_rng(7).integers(
            0, config.get_text_config().vocab_size, _NUM_TOKENS
        )
        with torch.no_grad():
            logits = model(torch.asarray(tokens)[None]).logits[0].numpy()
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    meta = {"transformers": transformers.__version__, "config": settings, "tensors": shapes}
    return {
        "meta": np.array(json.dumps(meta)),
        "tokens": tokens.astype(np.int32),
        "logits": logits.astype(np.float32),
    }


def main() -> int:
    """Write or check the named cases, all without names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    arguments = parser.parse_args()
    cases = json.loads((_DATA / "cases.json").read_text(encoding="utf-8"))
    failed = 0
    for name in arguments.cases or cases:
        found = run_case(cases[name])
        path = _DATA / f"{name}.npz"
        if not arguments.check:
            np.savez_compressed(path, allow_pickle=False, **found)
            print(f"{name}: {len(found['tokens'])} tokens, {path.stat().st_size} bytes")
            continue
        with np.load(path) as stored:
            error = float(np.abs(stored["logits"] - found["logits"]).max())
        print(f"{name}: largest difference {error:.2g}")
        failed += error > _TOLERANCE
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
