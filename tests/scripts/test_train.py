"""Training: bit-exact resumption, whole checkpoints whatever dies, clear errors, and learning."""

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax_scripts.training import run as run_module
from paged_jax_scripts.training.byte_tokenizer import byte_tokenizer
from paged_jax_scripts.training.run import Run, train
from paged_jax_scripts.training.saving import Checkpoints
from paged_jax_scripts.training.settings import Cadence, TrainSettings
from paged_jax_scripts.training.start import existing_model, new_model
from paged_jax_scripts.training.stories import SEPARATOR, make_corpus
from paged_jax_scripts.training.text import TokenRows, read_documents, split_off, tokenize
from paged_jax_scripts.training.update import (
    decayed,
    learning_rates,
    make_optimizer,
    make_update,
    new_state,
    token_losses,
)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 64,
}
SETTINGS = TrainSettings(
    num_steps=6, batch_size=4, seq_len=16, num_microbatches=2, num_warmup_steps=2
)
CADENCE = Cadence(log_every=1, eval_every=4, save_every=2, max_to_keep=2)


class Silent:
    """A display that only remembers."""

    def __init__(self, stop_at=math.inf):
        self.resumed_at, self.records, self._stop_at = [], [], stop_at

    def resumed(self, step):
        self.resumed_at.append(step)

    def updated(self, step):
        if step == self._stop_at:
            raise KeyboardInterrupt

    def recorded(self, metrics):
        self.records.append(metrics)


def make_run(out, *, settings=SETTINGS, cadence=CADENCE, num_stories=12, start=None):
    start = start or new_model("llama", TINY, seed=settings.seed)
    tokenizer, end_id = start.tokenizer, start.eos_token_ids[0]
    documents = make_corpus(num_stories, seed=1).split(SEPARATOR)[:-1]
    stream = tokenize(documents, tokenizer, end_id=end_id, vocab_size=257)
    learnt, held_out = split_off(stream, share=0.2, end_id=end_id)
    return Run(
        start=start,
        train=TokenRows(learnt, settings.seq_len, "text"),
        held_out=TokenRows(held_out, settings.seq_len, "eval_text"),
        settings=settings,
        cadence=cadence,
        out=out,
    )


def leaves_of(run):
    """The newest checkpoint's state, by name."""
    state = new_state(run.start.params, run.settings)
    with Checkpoints(run.out / "checkpoints", max_to_keep=2) as checkpoints:
        restored = checkpoints.restore(state, identity=run.identity)
    named, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert leaf.dtype == other[name].dtype, name
        assert leaf.tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("uninterrupted"))
    train(run, Silent())
    return run


@pytest.mark.parametrize(
    "stop_at", [3, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 5))]
)
def test_a_resumed_run_is_the_same_bit_for_bit(uninterrupted, tmp_path, stop_at):
    """Stopped before the first checkpoint, and one step after the first and the second."""
    run = make_run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(run, Silent(stop_at))
    again = Silent()
    train(make_run(tmp_path), again)
    assert again.resumed_at == ([stop_at - 1] if stop_at > 1 else [])
    state = leaves_of(uninterrupted)
    assert state[".step"] == 6
    assert len(state) == 27  # 8 weights and their two moments; three counts
    assert_same_bits(state, leaves_of(run))
    # Losses are those of the same rows in the same order; lines written twice are there once.
    metrics = [(out / "metrics.jsonl").read_text() for out in (uninterrupted.out, tmp_path)]
    assert metrics[0] == metrics[1]
    assert [json.loads(line)["step"] for line in metrics[0].splitlines()] == [
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        6,
    ]


def test_a_finished_run_is_left_as_it_is(uninterrupted):
    before = (uninterrupted.out / "model" / "manifest.json").stat().st_mtime_ns
    display = Silent()
    train(make_run(uninterrupted.out), display)
    assert display.resumed_at == [6]
    assert display.records == []
    assert (uninterrupted.out / "model" / "manifest.json").stat().st_mtime_ns == before


def test_the_last_checkpoints_are_kept(uninterrupted):
    with Checkpoints(uninterrupted.out / "checkpoints", max_to_keep=2) as checkpoints:
        assert checkpoints.steps == [4, 6]


TMP = ".orbax-checkpoint-tmp"
KILLED_PROGRAM = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_train

event, folder = sys.argv[2:]

def kill(name, args):
    if name == event and str(args[0]).endswith(folder):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
test_train.train(test_train.make_run(Path(sys.argv[1])), test_train.Silent())
"""


@pytest.mark.parametrize(
    ("event", "folder", "whole"),
    [
        # All is written, but the temporary folder does not have its name yet.
        pytest.param("os.rename", f"checkpoints/4{TMP}", 2, id="naming"),
        # The weights are written, but not all that describes them.
        pytest.param("os.rename", f"/4{TMP}/state{TMP}", 2, id="writing", marks=pytest.mark.long),
        # The third is there, and the first is about to be removed.
        pytest.param("shutil.rmtree", "checkpoints/2", 6, id="removing", marks=pytest.mark.long),
    ],
)
def test_a_kill_during_a_save_leaves_the_last_whole_checkpoint(
    uninterrupted, tmp_path, event, folder, whole
):
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = KILLED_PROGRAM.format(path=path)
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), event, folder],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache},
    )
    assert result.returncode == -signal.SIGKILL, result.stderr[-2000:]
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert any(name.endswith(TMP) for name in folders) == (whole == 2), folders
    assert folders[-1 if whole == 6 else 0] == str(whole)
    display, run = Silent(), make_run(tmp_path)
    train(run, display)
    assert display.resumed_at == [whole]
    assert_same_bits(leaves_of(uninterrupted), leaves_of(run))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left[-2:] == ["4", "6"]
    assert not any(name.endswith(TMP) for name in left)


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = make_run(tmp_path)
    train(run, Silent())
    (record,) = (tmp_path / "checkpoints" / "6" / "record").glob("metadata")
    record.write_bytes(record.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoints/6: damaged: .*delete the folder"):
        train(run, Silent())


def test_changed_weights_are_found_by_their_crc(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    train(run, Silent())
    monkeypatch.setattr(zlib, "crc32", lambda data: 1)
    with pytest.raises(ValueError, match=r"checkpoints/6: damaged: \['opt_state'\].* CRC-32"):
        train(run, Silent())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"learning_rate=0.5 must be 0.003"),
        ({"num_steps": 9, "seed": 3}, r"num_steps=9 must be 6, seed=3 must be 0"),
    ],
)
def test_other_settings_do_not_resume(uninterrupted, changes, message):
    settings = dataclasses.replace(SETTINGS, **changes)
    run = make_run(uninterrupted.out, settings=settings)
    with pytest.raises(ValueError, match=r"checkpoints/6: .*" + message):
        train(run, Silent())


def test_another_text_or_model_does_not_resume(uninterrupted):
    with pytest.raises(ValueError, match="train text"):
        train(make_run(uninterrupted.out, num_stories=13), Silent())
    start = new_model("llama", TINY | {"num_layers": 1}, seed=0)
    with pytest.raises(ValueError, match="config="):
        train(make_run(uninterrupted.out, start=start), Silent())


@pytest.mark.long
def test_microbatches_change_only_rounding():
    """The same update in one part and in four; gradients are means over the whole batch."""
    start = new_model("llama", TINY, seed=0)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 257, (8, 17)), jnp.int32)
    results = []
    for count in (1, 4):
        settings = dataclasses.replace(SETTINGS, batch_size=8, num_microbatches=count)
        update = make_update(start.apply_fn("float32"), settings)
        state = new_state(start.params, settings)
        results.append(update(state, rows))
    (one, one_stats), (four, four_stats) = results
    np.testing.assert_allclose(one_stats.loss, four_stats.loss, rtol=1e-5)
    np.testing.assert_allclose(one_stats.grad_norm, four_stats.grad_norm, rtol=1e-4)
    mu = [jax.tree.leaves(state.opt_state[1][0].mu) for state in (one, four)]
    for a, b in zip(*mu, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        assert np.abs(a).max() > 1e-5


def test_bfloat16_computes_on_float32_weights():
    start = new_model("llama", TINY, seed=0)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 257, (4, 17)), jnp.int32)
    losses = {
        dtype: jax.jit(functools.partial(token_losses, recompute_scores=True), static_argnums=0)(
            start.apply_fn(dtype), start.params, rows
        )
        for dtype in ("float32", "bfloat16")
    }
    assert {x.dtype for x in losses.values()} == {jnp.dtype("float32")}
    assert 0 < np.abs(losses["float32"] - losses["bfloat16"]).max() < 0.1
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    state, _ = make_update(start.apply_fn("bfloat16"), settings)(
        new_state(start.params, settings), rows
    )
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def test_the_schedule():
    settings = dataclasses.replace(SETTINGS, num_steps=110, num_warmup_steps=10, learning_rate=1.0)
    rates = learning_rates(settings)
    np.testing.assert_allclose(
        [rates(step) for step in (0, 5, 10, 60, 110)], [0, 0.5, 1, 0.55, 0.1], atol=1e-6
    )
    settings = dataclasses.replace(settings, num_warmup_steps=0)
    np.testing.assert_allclose([learning_rates(settings)(s) for s in (0, 55)], [1, 0.55], atol=1e-6)


@pytest.mark.long
def test_gradients_are_clipped_and_only_matrices_decay():
    params = {"layers": {"norm": jnp.ones((2, 4)), "out": jnp.ones((2, 4, 4))}, "b": jnp.ones(3)}
    assert decayed(params) == {"layers": {"norm": False, "out": True}, "b": False}
    settings = dataclasses.replace(SETTINGS, num_warmup_steps=0, max_grad_norm=0.5, beta1=0.0)
    optimizer = make_optimizer(settings)
    huge = jax.tree.map(lambda x: 100 * x, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = optimizer.update(huge, optimizer.init(params), params)
    norm = math.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(state[1][0].mu)))
    assert norm == pytest.approx(0.5, rel=1e-5)
    changes, _ = optimizer.update(zeros, optimizer.init(params), params)
    rate = settings.learning_rate * settings.weight_decay
    np.testing.assert_allclose(changes["layers"]["out"], -rate, rtol=1e-5)
    assert float(jnp.abs(changes["layers"]["norm"]).max()) == 0


def test_rows_and_their_order():
    rows = TokenRows(np.arange(52, dtype=np.int32), 5, "text")
    assert len(rows) == 10
    assert rows.take(np.array([0, 9])).tolist() == [[0, 1, 2, 3, 4, 5], [45, 46, 47, 48, 49, 50]]
    epochs = [
        [int(row[0]) // 5 for step in range(3) for row in rows.batch_of(
            3 * epoch + step, batch_size=3, seed=1)]
        for epoch in range(2)
    ]  # fmt: skip
    for order in epochs:
        assert len(set(order)) == 9
    assert epochs[0] != epochs[1]
    again = rows.batch_of(4, batch_size=3, seed=1)
    np.testing.assert_array_equal(again, rows.batch_of(4, batch_size=3, seed=1))
    assert not np.array_equal(again, rows.batch_of(4, batch_size=3, seed=2))
    assert [len(batch) for batch in rows.batches(4)] == [4, 4, 2]


def test_texts_become_a_stream(tmp_path):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n two\n<|endoftext|>\n", "utf-8")
    (tmp_path / "b.txt").write_bytes("\ufeffdrei ü".encode())
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    documents = read_documents(paths, separator=SEPARATOR)
    assert documents == ["one", "two", "drei ü"]
    assert len(read_documents(paths, separator="")) == 2
    tokenizer = byte_tokenizer()
    stream = tokenize(documents, tokenizer, end_id=256, vocab_size=257)
    assert stream.tolist() == [*b"one", 256, *b"two", 256, *"drei ü".encode(), 256]
    assert tokenizer.decode(stream[:3].tolist()) == "one"
    learnt, held_out = split_off(stream, share=0.6, end_id=256)
    assert (len(learnt), len(held_out)) == (8, 8)  # cut at 6, moved to the document's end
    with pytest.raises(ValueError, match=r"id 256 must lie in the model's vocabulary, \[0, 256\)"):
        tokenize(documents, tokenizer, end_id=256, vocab_size=256)
    with pytest.raises(ValueError, match=r"eval_share=1\.5"):
        split_off(stream, share=1.5, end_id=256)


def test_every_byte_is_a_token():
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(0x250))) + "€𝄞 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert ids == [*text.removesuffix(SEPARATOR).encode(), 256]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.token_bytes(200)) == (257, b"\xc8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"batch_size": 6, "num_microbatches": 4}, "num_microbatches=4 must divide batch_size=6"),
        ({"num_warmup_steps": 300}, r"num_warmup_steps=300 must lie in \[0, num_steps=300\)"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm=inf"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"final_share": 1.5}, "final_share=1.5"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16'"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**changes)


def test_bad_cadence():
    with pytest.raises(ValueError, match="save_every=0 must be an integer >= 1"):
        Cadence(save_every=0)


def test_runs_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="seq_len=65 must be at most the model's max_position=64"):
        make_run(tmp_path, settings=dataclasses.replace(SETTINGS, seq_len=65))
    settings = dataclasses.replace(SETTINGS, batch_size=1000)
    with pytest.raises(ValueError, match=r"batch_size=1000 must be at most \d+: text has \d+ tok"):
        make_run(tmp_path, settings=settings)
    with pytest.raises(ValueError, match="eval_text must have more than seq_len=16 tokens"):
        TokenRows(np.zeros(16, np.int32), 16, "eval_text")


def test_bad_models():
    with pytest.raises(ValueError, match="family='cnn' must be one of"):
        new_model("cnn", {}, seed=0)
    with pytest.raises(ValueError, match="hidden"):
        new_model("llama", {"hidden": 3}, seed=0)
    with pytest.raises(ValueError, match="end_token='<end>' must be one token"):
        new_model("llama", TINY, seed=0, end_token="<end>")
    start = new_model("llama", TINY, seed=0)
    with pytest.raises(ValueError, match="must have a token that ends a text"):
        dataclasses.replace(start, eos_token_ids=())


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    start = new_model("llama", TINY, seed=0)
    params = {**start.params, "embedding": start.params["embedding"] * math.nan}
    run = make_run(tmp_path, start=dataclasses.replace(start, params=params))
    with pytest.raises(ValueError, match=r"learning_rate=0.003 must be smaller: at step 1 .* nan"):
        train(run, Silent())
    assert not (tmp_path / run_module.MODEL_FOLDER).exists()


def test_what_was_trained_decodes_and_can_be_trained_on(uninterrupted, tmp_path):
    folder = uninterrupted.out / "model"
    model = load_model(folder, progress=False)
    state = leaves_of(uninterrupted)
    np.testing.assert_array_equal(model.params["embedding"], state[".params['embedding']"])
    engine = Engine(model, config=EngineConfig(num_blocks=9))
    (output,) = engine.generate("Ben", SamplingParams(temperature=0.0, max_tokens=4))
    assert len(output.token_ids) == 4
    start = existing_model(folder)
    assert start.config == uninterrupted.start.config
    assert start.eos_token_ids == (256,)
    display = Silent()
    train(make_run(tmp_path, start=start), display)
    first = next(r["loss"] for r in display.records if "loss" in r)
    last = json.loads((uninterrupted.out / "metrics.jsonl").read_text().splitlines()[-2])["loss"]
    assert abs(first - last) < 1  # it begins where the other run ended, not anew


def run_train(run_program, *args):
    return run_program("train", *args, is_toy=False)


FLAGS = (
    f"--sizes={json.dumps(TINY)}",
    "--batch_size=4",
    "--seq_len=32",
    "--num_warmup_steps=0",
    "--eval_share=0.2",
)


@pytest.mark.long
def test_the_program(run_program, toy_model, tmp_path):
    """A new model, the same command again with more steps, and a GGUF file that is trained on."""
    text = tmp_path / "stories.txt"
    made = run_program("make_stories", f"--out={text}", "--num_stories=20", is_toy=False)
    assert made.returncode == 0, made.stderr
    assert text.read_text() == make_corpus(20, seed=0)
    flags = (f"--text={text}", *FLAGS)
    out = tmp_path / "run"
    result = run_train(run_program, *flags, f"--out={out}", "--num_steps=3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(out / "model")
    assert "step 3: held out" in result.stderr
    again = run_train(run_program, *flags, f"--out={out}", "--num_steps=4")
    assert again.returncode == 2
    assert "num_steps=4 must be 3" in again.stderr
    assert "Traceback" not in again.stderr
    tuned = run_train(
        run_program, f"--text={text}", *FLAGS[1:], f"--model={toy_model}", "--num_steps=1",
        f"--out={tmp_path / 'tuned'}", f"--cache_dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr
    settings = json.loads((tmp_path / "tuned" / "model" / "config.json").read_text())
    assert settings["eos_token_ids"] == [1]


def test_bad_texts(tmp_path):
    files = {"empty.txt": b" \n", "latin.txt": "ü".encode("latin-1")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name, message in (("empty.txt", "must hold text"), ("latin.txt", "must be UTF-8 text")):
        with pytest.raises(ValueError, match=rf"{name}: {message}"):
            read_documents([tmp_path / name], separator=SEPARATOR)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no text: give --text"),
        (("--text=short.txt", "--sizes=["), "--sizes=[: must be JSON"),
        (("--text=short.txt", "--model=x.gguf", "--family=llama"), "--family is of a new model"),
    ],
)
def test_bad_flags(run_program, tmp_path, args, message):
    result = run_train(run_program, *args, f"--out={tmp_path / 'run'}")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_million_weights_learn_the_stories(tmp_path):
    """The default run: its loss, and that it goes on in words and sentences of the corpus."""
    start = new_model("llama", {}, seed=0)
    assert 0.9e6 < start.num_params < 1.1e6
    run = make_run(
        tmp_path, settings=TrainSettings(), cadence=Cadence(), num_stories=6000, start=start
    )
    out = train(run, Silent())
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert metrics[0]["loss"] > 4
    assert metrics[-1]["eval_loss"] < 0.3
    model = load_model(out, progress=False)
    engine = Engine(model, config=EngineConfig(num_blocks=257))
    prompts = ["One rainy day, Nora was in the barn.", "It was a cold day. Hugo went"]
    params = SamplingParams(temperature=0.0, max_tokens=80)
    words = set(text_words(make_corpus(6000, seed=1)))
    for output in engine.generate(prompts, params):
        whole = output.text[: output.text.rindex(".")]  # the last sentence may be cut off
        assert len(text_words(whole)) > 5
        assert set(text_words(whole)) <= words, output.text


def text_words(text):
    return "".join(char if char.isalpha() else " " for char in text).split()
