"""The record that the engine takes a model as."""

import dataclasses

import pytest

from paged_jax.config import ModelSpec
from paged_jax.model import Model, Tokenizer

SPEC = ModelSpec(
    num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10, max_position=16
)


def identity(params, tokens, positions, cache, *, logits_at):
    return params[logits_at], cache


def test_a_users_own_model_is_one_line():
    model = Model(apply=identity, params=None, spec=SPEC)
    assert (model.tokenizer, model.eos_token_ids, model.name) == (None, (), "model")


def test_the_record_is_frozen():
    model = Model(apply=identity, params=None, spec=SPEC)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"eos_token_ids=\(10,\) must lie in \[0, 10\)"):
        Model(apply=identity, params=None, spec=SPEC, eos_token_ids=(10,))


def test_apply_must_be_callable():
    with pytest.raises(ValueError, match="apply=3 must be callable"):
        Model(apply=3, params=None, spec=SPEC)  # pyright: ignore[reportArgumentType]


def test_spec_must_be_a_model_spec():
    with pytest.raises(ValueError, match="spec='tiny' must be a ModelSpec"):
        Model(apply=identity, params=None, spec="tiny")  # pyright: ignore[reportArgumentType]


def test_the_tokenizer_protocol_is_structural():
    class Bytes:
        def encode(self, text):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode()

        def token_bytes(self, token_id):
            return bytes([token_id])

    assert isinstance(Bytes(), Tokenizer)
    assert not isinstance(object(), Tokenizer)
