"""The installed package works from a folder that has its own ``models`` and ``scripts``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USER_PROGRAM = """
import models, scripts
assert models.MINE and scripts.MINE, "the user's own packages must win here"
import jax.numpy as jnp
import paged_jax, pallas_kernels
from paged_jax import Engine, Model, ModelSpec, SamplingParams

def apply(params, tokens, positions, cache, *, logits_at):
    x = jnp.ones((*tokens.shape, 2, 4))
    out, cache = cache.attend(0, x, x[:, :, :1], x[:, :, :1])
    return jnp.zeros((*logits_at.shape, 7)).at[..., 3].set(1) + out.sum() * 0, cache

spec = ModelSpec(
    num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=7, max_position=64
)
engine = Engine(Model(apply=apply, params={}, spec=spec))
print(engine.generate([1, 2], SamplingParams(temperature=0.0))[0].token_ids)
print(paged_jax.__file__)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "paged-jax"
    # A copy: building leaves folders behind in the source.
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
    result = subprocess.run(
        [*command, str(folder), str(source)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        if os.environ.get("CI") == "true" or "network" not in result.stderr.lower():
            pytest.fail(result.stderr)
        pytest.skip(f"pip could not build the package: {result.stderr}")
    return folder


def run(command, site, cwd):
    env = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_a_users_own_models_and_scripts(site, tmp_path):
    for name in ("models", "scripts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    result = run([sys.executable, "program.py"], site, tmp_path)
    assert result.returncode == 0, result.stderr
    tokens, where = result.stdout.splitlines()
    assert eval(tokens) == (3,) * 16
    assert where.startswith(str(site))
    program = run([str(site / "bin" / "paged-jax-generate"), "--help"], site, tmp_path)
    assert "--prompt_file" in program.stdout, program.stderr


def test_the_wheel_is_whole(site):
    for name in ("paged_jax", "pallas_kernels", "models"):
        assert (site / name / "py.typed").is_file()
    assert (site / "paged_jax_scripts" / "data" / "workload_32.json").is_file()
    # Every package of the source tree is in the wheel.
    installed = {path.relative_to(site).as_posix() for path in site.rglob("*.py")}
    for package in ("paged_jax", "pallas_kernels", "models"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in installed
