"""From a name or a GGUF file to a model: conversion, its cache, and what goes wrong."""

import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models import KNOWN_MODELS, llama, load_model
from models.llama import LlamaConfig, RopeScaling, random_params

LIMIT_SECONDS = 60.0


def toy_config(vocab_size):
    return LlamaConfig.tiny(vocab_size=vocab_size, tie_embeddings=False)


def load(path, tmp_path, **options):
    return load_model(path, cache_dir=tmp_path / "cache", progress=False, **options)


def checkpoint_of(tmp_path):
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    return folder


def test_the_weights_arrive_unchanged(write_gguf, tmp_path):
    model = load(write_gguf(), tmp_path)
    config = toy_config(model.spec.vocab_size)
    expected = random_params(config, 0)
    assert model.spec == config.spec
    assert (model.name, model.eos_token_ids) == ("toy", (1,))
    np.testing.assert_array_equal(model.params["head"], expected["head"])
    for name, entry in expected["layers"].items():
        np.testing.assert_array_equal(model.params["layers"][name]["weight"], entry["weight"])


def test_layers_with_weights_of_their_own(write_gguf, tmp_path):
    stacked = load(write_gguf(), tmp_path).params["layers"]
    layers = load(write_gguf(), tmp_path, unroll=True).params["layers"]
    for index, layer in enumerate(layers):
        for name, entry in stacked.items():
            np.testing.assert_array_equal(layer[name]["weight"], entry["weight"][index])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(write_gguf, tmp_path, dtype):
    model = load(write_gguf(), tmp_path, dtype=dtype)
    assert model.params["embedding"].dtype == jnp.dtype(dtype)
    with pytest.raises(ValueError, match="dtype='int8' must be 'float32'"):
        load(write_gguf(), tmp_path, dtype="int8")


def test_later_loads_do_not_read_the_file(write_gguf, tmp_path, monkeypatch):
    path = write_gguf()
    first = load(path, tmp_path)
    monkeypatch.delattr("models.stored.GgufFile")
    second = load(path, tmp_path)
    np.testing.assert_array_equal(first.params["embedding"], second.params["embedding"])
    assert second.tokenizer.encode("hello") == first.tokenizer.encode("hello")


def test_a_changed_file_is_converted_again(write_gguf, tmp_path):
    load(write_gguf(), tmp_path)
    norm = np.full(32, 2, np.float32)
    model = load(write_gguf(tensors={"output_norm.weight": norm}), tmp_path)
    np.testing.assert_array_equal(model.params["final_norm"]["weight"], norm)


@pytest.mark.parametrize("name", ["gpt5", "absent.gguf", ""])
def test_an_unknown_name_lists_the_known_ones(tmp_path, name):
    with pytest.raises(
        ValueError, match=rf"name_or_path='{name}' must be .*'smollm2-135m-instruct'"
    ):
        load(name, tmp_path)
    assert "smollm2-135m-instruct" in KNOWN_MODELS


def test_tied_embeddings_have_no_head(write_gguf, tmp_path):
    model = load(write_gguf(tensors={"output.weight": None}), tmp_path)
    assert "head" not in model.params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, r"architecture='gpt2' must be one of .*'llama'"),
        ({"metadata": {"llama.block_count": None}}, r"metadata key 'llama\.block_count'"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "num_kv_heads=3 must divide"),
        ({"metadata": {"llama.vocab_size": 9}}, r"vocab_size=9 must be >= 263"),
        (
            {"metadata": {"llama.vocab_size": 999}},
            r"'token_embd\.weight': expected shape \(999, 32",
        ),
        ({"metadata": {"llama.rope.scaling.type": "linear"}}, r"type='linear' must be 'none'"),
        ({"metadata": {"llama.expert_count": 4}}, r"expert_count=4 must be 0"),
        ({"metadata": {"llama.block_count": 1}}, r"tensor 'blk\.1\..*no such tensor in a Llama"),
        (
            {"metadata": {"llama.block_count": 3}},
            r"tensor 'blk\.2\.attn_norm\.weight': expected shape",
        ),
        (
            {"tensors": {"blk.1.ffn_up.weight": None}},
            r"tensor 'blk\.1\.ffn_up\.weight': expected shape \(48, 32\), the file has no",
        ),
        (
            {"tensors": {"blk.0.ffn_down.weight": np.zeros((48, 32), np.float32)}},
            r"'blk\.0\.ffn_down\.weight': expected shape \(32, 48\), found \(48, 32\)",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}},
            r"tensor 'blk\.0\.attn_q\.bias': expected no such tensor",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.array([1, 2, 1, 8], np.float32)}},
            r"tensor 'rope_freqs\.weight': expected Llama 3's divisors for factor 8",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(write_gguf, tmp_path, changes, message):
    path = write_gguf(**changes)
    with pytest.raises(ValueError, match=rf"toy\.gguf.*{message}"):
        load(path, tmp_path)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_llama3_scaling_is_recognised(write_gguf, tmp_path):
    plain = LlamaConfig.tiny(vocab_size=263, tie_embeddings=False, rope_theta=500_000.0)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(factor=8.0))
    divisors = plain.frequencies / scaled.frequencies
    load(write_gguf(config=plain, tensors={"rope_freqs.weight": divisors}), tmp_path)
    settings = json.loads((checkpoint_of(tmp_path) / "config.json").read_text())
    assert LlamaConfig.from_json(settings["config"]).rope_scaling == RopeScaling(factor=8.0)


@pytest.mark.parametrize("content", ["{}", '{"config": {}, "eos_token_ids": []}'])
def test_a_damaged_checkpoint_config_is_named(write_gguf, tmp_path, content):
    path = write_gguf()
    load(path, tmp_path)
    (checkpoint_of(tmp_path) / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: expected a model's settings"):
        load(path, tmp_path)


def test_a_checkpoint_of_another_geometry_names_the_tensor(write_gguf, tmp_path):
    path = write_gguf()
    load(path, tmp_path)
    file = checkpoint_of(tmp_path) / "config.json"
    settings = json.loads(file.read_text())
    settings["config"]["intermediate_size"] = 64
    file.write_text(json.dumps(settings))
    message = r"tensor 'layers\.down\.weight': expected \(2, 64, 32\), found \(2, 48, 32\)"
    with pytest.raises(ValueError, match=message):
        load(path, tmp_path)


class TestProcesses:
    """Real processes that convert the same file."""

    SCRIPT = """
        import pathlib, sys, time
        from models import loading

        gguf, cache, signals, stop_in = sys.argv[1:]
        signals = pathlib.Path(signals)

        def stop(name):
            (signals / name).touch()
            time.sleep(1000)

        convert, write, open_gguf = loading._convert, loading.write_orbax, loading.open_gguf

        def counted(*args, **kwargs):
            print("converted", flush=True)
            time.sleep(0.5)  # the other process meets the lock
            convert(*args, **kwargs)

        def reading(*args):
            if stop_in == "reading":
                stop("reading")
            return open_gguf(*args)

        def writing(*args, **kwargs):
            write(*args, **kwargs)
            if stop_in == "written":
                stop("written")

        loading._convert, loading.write_orbax, loading.open_gguf = counted, writing, reading
        (signals / f"ready-{stop_in}").touch()
        while stop_in in "ab" and not (signals / "go").exists():
            time.sleep(0.01)
        model = loading.load_model(gguf, cache_dir=cache, progress=False)
        print(float(model.params["embedding"].sum()), flush=True)
    """

    def start(self, path, tmp_path, stop_in):
        signals = tmp_path / "signals"
        signals.mkdir(exist_ok=True)
        arguments = [str(path), str(tmp_path / "cache"), str(signals), stop_in]
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(llama.__file__).parents[2],
        )

    def wait_for(self, path, process):
        end = time.monotonic() + LIMIT_SECONDS
        while not path.exists():
            assert process.poll() is None, "the process ended early"
            assert time.monotonic() < end, f"{path.name} did not appear"
            time.sleep(0.01)

    def test_two_first_runs_at_once(self, write_gguf, tmp_path):
        path = write_gguf()
        processes = [self.start(path, tmp_path, name) for name in "ab"]
        for name, process in zip("ab", processes, strict=True):
            self.wait_for(tmp_path / "signals" / f"ready-{name}", process)
        (tmp_path / "signals" / "go").touch()
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0].split() for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert outputs[0][-1] == outputs[1][-1]
        assert sum("converted" in output for output in outputs) == 1
        assert checkpoint_of(tmp_path).is_dir()

    @pytest.mark.parametrize("stop_in", ["reading", "written"])
    def test_kill_in_the_middle(self, write_gguf, tmp_path, stop_in):
        path = write_gguf()
        process = self.start(path, tmp_path, stop_in)
        self.wait_for(tmp_path / "signals" / stop_in, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT_SECONDS)
        (leftover,) = [found for found in (tmp_path / "cache").iterdir() if found.is_dir()]
        assert ".tmp-" in leftover.name
        model = load(path, tmp_path)
        assert checkpoint_of(tmp_path) != leftover
        expected = random_params(toy_config(model.spec.vocab_size), 0)["embedding"]
        np.testing.assert_array_equal(model.params["embedding"], expected)


@pytest.mark.weights
def test_the_real_model(smollm2):
    assert smollm2.spec == LlamaConfig.smollm2_135m().spec
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.name == "smollm2-135m-instruct"


@pytest.mark.weights
def test_the_real_model_loads_from_the_cache_in_seconds(smollm2):
    assert smollm2 is not None  # converted by now
    start = time.perf_counter()
    load_model(dtype="bfloat16")
    seconds = time.perf_counter() - start
    print(f"loaded in {seconds:.2f} s")
    assert seconds < 10  # 1.2 s on a quiet machine
