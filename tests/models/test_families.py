"""What all families must do alike, and what each refuses; their logits: test_hf_goldens.py."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from suites.fixed_batch import FixedBatch
from suites.hf_golden import CASES, Golden

from models.checkpoints.hf_config import HfConfig
from models.common.rope import LongRope
from models.common.weights import unstack_layers
from models.gpt2 import GPT2, Gpt2Config
from models.loading import load_model
from models.opt import OPT, OptConfig
from models.registry import FAMILIES, family_of
from paged_jax.batch import BatchLayout
from paged_jax.cache import DenseKVCache
from paged_jax.pool import KVPool, bytes_per_block
from paged_jax.row_state import create
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.simulation import machines
from paged_jax.step import make_step


def config_of(name, **changes):
    """The configuration of a golden case."""
    golden = Golden.load(name)
    family = FAMILIES[CASES[name]["family"]]
    hf = HfConfig(f"{name}/config.json", golden.config | changes)
    return family, family.config_from_hf(hf)


def num_params(family, config):
    return sum(math.prod(weight.leaf_shape) for weight in family.weights(config))


def few_of_the_cases(*names):
    """These in ``make test``, all of them in the long tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in CASES]


IN_PLACE, UNROLLED = few_of_the_cases("gpt2", "mixtral"), few_of_the_cases("gemma3", "mixtral")


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_decode_step_updates_the_pool_in_place(name):
    family, config = config_of(name)
    spec = config.spec
    block = bytes_per_block(spec, block_size=16, dtype="float32")
    make = functools.partial(KVPool.create, spec, num_blocks=2**28 // block, block_size=16)
    pool = jax.eval_shape(make)
    params = jax.eval_shape(lambda: family.random_params(config, 0))
    layout = BatchLayout(
        num_rows=4,
        num_new=1,
        table_width=8,
        vocab_size=spec.vocab_size,
        is_decode=True,
        flags=SamplerFlags(),
    )
    packed = jax.ShapeDtypeStruct((4, layout.num_columns), jnp.int32)
    step = make_step(family.as_model(config, params).apply, backend=None, donate=True)
    state = jax.eval_shape(lambda: create(4))
    memory = step.lower(params, pool, state, packed, layout=layout).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.05 * pool.nbytes


@pytest.mark.parametrize("name", UNROLLED)
def test_layers_with_weights_of_their_own_say_the_same(name):
    family, config = config_of(name)
    params = family.random_params(config, 0)
    stacked = family.as_model(config, params)
    copied = jax.tree.map(lambda leaf: leaf, params)  # its dicts are emptied
    copied = unstack_layers(copied, num_layers=config.num_layers)
    unrolled = dataclasses.replace(stacked, params=copied)
    prompts = [list(range(5, 19)), [7, 3]]
    logits = []
    for model in (stacked, unrolled):
        batch = FixedBatch(model, "paged", num_rows=2, capacity=16, block_size=4, fill=np.nan)
        logits.append([batch.prefill(prompts, chunk=4), batch.run([[1], [2]], [1, 1])[:, 0]])
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5, rtol=1e-5)
    assert len(copied["layers"]) == config.num_layers
    assert num_params(family, config) == sum(leaf.size for leaf in jax.tree.leaves(copied))


@pytest.mark.parametrize("name", CASES)
def test_settings_survive_json(name):
    _, config = config_of(name)
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_weights_is_what_the_module_declares(name):
    family, config = config_of(name)
    cache = DenseKVCache.create(config.spec, batch_size=1, capacity=4)
    module, ids = family.module_class(config), jnp.zeros((1, 4), jnp.int32)
    variables = jax.eval_shape(
        lambda: module.init(jax.random.key(0), ids, ids, cache, logits_at=ids)
    )
    declared = jax.tree.map(lambda leaf: leaf.shape, variables["params"])
    assert declared == family.param_shapes(config)


@pytest.mark.parametrize(
    ("make", "geometry"),
    [
        (OptConfig.opt_13b, machines.OPT_13B),
        (OptConfig.opt_66b, machines.OPT_66B),
        (OptConfig.opt_175b, machines.OPT_175B),
    ],
)
def test_sizes_of_opt_are_those_that_are_simulated(make, geometry):
    config = make()
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"):
        assert getattr(config, name) == getattr(geometry, name)
    assert num_params(OPT, config) == pytest.approx(geometry.num_params, rel=2e-3)


def test_gpt2_has_124_million_weights():
    assert num_params(GPT2, Gpt2Config.small()) == 124_439_808


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_folders_may_leave_out_the_prefix(tmp_path, name, prefix):
    golden = Golden.load(name)
    whole = golden.write_folder(tmp_path / "whole", num_shards=1)
    short = golden.write_folder(tmp_path / "short", num_shards=1)
    (short / "model.safetensors.index.json").unlink()
    (file,) = short.glob("*.safetensors")
    tensors = load_file(file)
    assert all(key.startswith(prefix) for key in tensors)
    masks = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)} if name == "gpt2" else {}
    save_file({key.removeprefix(prefix): value for key, value in tensors.items()} | masks, file)
    one, other = (load_model(folder, progress=False).params for folder in (whole, short))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True must be False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be one of 'default'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "must have the entry 'factor'"),
        ("llama", {"hidden_size": None}, "expected the entry 'hidden_size'"),
        ("llama", {"hidden_size": "32"}, "hidden_size='32' must be an integer"),
        ("llama", {"num_attention_heads": 0}, "num_heads=0 must be"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be >= 1"),
        ("qwen2_windows", {"layer_types": ["full_attention"]}, "must be 3 sizes"),
        ("gpt2", {"activation_function": "relu"}, "must be 'gelu_new'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must be False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True must be False"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True must be False"),
        ("gpt2", {"n_head": 5}, "hidden_size=32 must be num_heads=5"),
        ("opt", {"enable_bias": False}, "enable_bias=False must be True"),
        ("opt", {"_remove_final_layer_norm": True}, "must be False"),
        ("opt", {"num_attention_heads": 5}, "hidden_size=32 must be num_heads=5"),
        ("phi3", {"partial_rotary_factor": 1.5, "rope_parameters": {}}, "rotary_dim=12 must be"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_token=5 must lie in 1 to"),
    ],
)
def test_what_a_family_does_not_have_is_refused(tmp_path, name, changes, message):
    folder = Golden.load(name).write_folder(tmp_path / name, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model(folder, progress=False)
    assert "config.json" in str(error.value)


def test_long_rope_must_have_a_divisor_a_frequency(tmp_path):
    golden = Golden.load("phi3_long")
    settings = golden.config["rope_parameters"] | {"long_factor": [1.0], "short_factor": [1.0]}
    folder = golden.write_folder(tmp_path, rope_parameters=settings)
    with pytest.raises(ValueError, match=r"config.json: .*have 1 entries, must have 3"):
        load_model(folder, progress=False)


def test_long_rope_is_of_the_context_that_is_served():
    _, config = config_of("phi3_short")
    scaling = config.rope_scaling
    assert isinstance(scaling, LongRope)
    np.testing.assert_allclose(
        config.frequencies / config.with_max_position(96).frequencies,
        np.divide(scaling.short_factors, scaling.long_factors),
        rtol=1e-6,
    )
    assert config.with_max_position(96).rotation_scale == config.rotation_scale > 1
    with pytest.raises(ValueError, match="max_position=96 must be that of LongRope"):
        dataclasses.replace(config, max_position=96)


@pytest.mark.parametrize(
    ("window", "expected"), [("missing", 4096), (None, None), (8, 8)], ids=["missing", "null", "8"]
)
def test_missing_entries_of_mistral_are_those_of_its_first_model(window, expected):
    sizes = {"hidden_size": 64, "num_attention_heads": 16, "intermediate_size": 64}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    given = {} if window == "missing" else {"sliding_window": window}
    config = FAMILIES["mistral"].config_from_hf(HfConfig(Path("config.json"), sizes | given))
    assert (config.sliding_window, config.num_kv_heads) == (expected, 8)


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match=r"x: model_type='bert' must be one of .*'llama'"):
        family_of("bert", where="x")


def test_experts_of_a_token_do_not_depend_on_the_others():
    family, config = config_of("mixtral")
    model = family.as_model(config, family.random_params(config, 3))
    alone = FixedBatch(model, "paged", num_rows=1, capacity=8).prefill([[5, 6, 7]], chunk=8)
    prompts = [[5, 6, 7], [9] * 8, [1, 2, 3, 4]]
    batch = FixedBatch(model, "paged", num_rows=3, capacity=8).prefill(prompts, chunk=8)
    np.testing.assert_allclose(batch[0], alone[0], atol=1e-5)
