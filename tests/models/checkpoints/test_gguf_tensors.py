"""GGUF files of several architectures, by one table of names."""

import gguf
import jax
import numpy as np
import pytest
from suites.toy_gguf import TOY_TOKENS, permute_rows, toy_metadata

from models.checkpoints import GgufFile
from models.checkpoints.gguf_tensors import GgufTensors
from models.common.streaming import blocks_of, split_blocks
from models.loading import load_model
from models.registry import FAMILIES

SERVED = {name: family for name, family in FAMILIES.items() if family.gguf is not None}
NAMES = {"self_attn.q_proj": "attn_q", "embed_tokens": "token_embd"}


def write_family(path, name):
    """A file as llama.cpp's converter writes it: q and k permuted for ``llama`` alone."""
    family = SERVED[name]
    (architecture,) = family.gguf.architectures
    config = family.config_class.tiny(vocab_size=len(TOY_TOKENS), tie_embeddings=False)
    params = family.random_params(config, 0)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in toy_metadata(config).items():
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        key = key.replace("llama.", f"{architecture}.")
        adders.get(type(value), writer.add_array)(key, value)
    table = family.weights(config)
    modules = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    for tensor, value in split_blocks(blocks_of(params, table), table):
        stored = modules.get_name(tensor, try_suffixes=(".weight", ".bias"))
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        module = stored.split(".")[-2]
        if architecture == "llama" and module in heads:
            value = permute_rows(value, heads[module])
        writer.add_tensor(stored, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, params


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_weights_arrive_unchanged(tmp_path, name):
    path = tmp_path / "x.gguf"
    config, params = write_family(path, name)
    model = load_model(path, cache_dir=tmp_path / "cache", progress=False)
    assert model.spec == config.spec
    jax.tree.map(np.testing.assert_array_equal, model.params, params)


def test_rows_of_some_heads_are_those_of_the_whole(write_gguf):
    tensors = GgufTensors(GgufFile(write_gguf()), NAMES, interleaved={"attn_q": 4})
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = tensors.tensor(name, (32, 32))
    for start, stop in ((0, 32), (0, 8), (3, 11), (9, 10), (17, 32)):
        part = tensors.tensor(name, (32, 32), slice(start, stop))
        np.testing.assert_array_equal(part, whole[start:stop])


def test_norms_that_are_stored_with_one_added(write_gguf):
    values = np.linspace(0.5, 2, 32, dtype=np.float32)
    file = GgufFile(write_gguf(tensors={"blk.0.attn_norm.weight": values}))
    tensors = GgufTensors(file, {"input_layernorm": "attn_norm"}, less_one=("attn_norm",))
    found = tensors.tensor("model.layers.0.input_layernorm.weight", (32,), slice(3, 30))
    np.testing.assert_array_equal(found, values[3:30] - 1)


def test_names(write_gguf):
    tensors = GgufTensors(GgufFile(write_gguf()), NAMES)
    assert tensors.stored_name("model.embed_tokens.weight") == "token_embd.weight"
    assert tensors.stored_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"


def test_left_over_tensors_are_named(write_gguf):
    tensors = GgufTensors(GgufFile(write_gguf()), NAMES)
    with pytest.raises(
        ValueError, match=r"toy\.gguf: tensor 'blk\.0\.attn_k\.weight': expected no"
    ):
        tensors.require_only({"model.embed_tokens.weight"}, family="Llama")
