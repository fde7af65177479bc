import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model

from paged_jax.prompts import as_prompt_list, encode_prompt

MODEL = hash_model.make_model()


@pytest.mark.parametrize(
    "prompt", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), jnp.array([1, 2]), [np.int32(1), 2]]
)
def test_what_is_a_prompt(prompt):
    assert encode_prompt(prompt, MODEL) == [1, 2]
    assert len(as_prompt_list(prompt)) == 1
    assert len(as_prompt_list([prompt, prompt])) == 2


@pytest.mark.parametrize("prompt", [b"ab", {1, 2}, {1: 2}, [1, "a"], [True], [1.0], [[1]], None, 5])
def test_what_is_none(prompt):
    with pytest.raises(ValueError, match="must be a string or a flat list of token ids"):
        encode_prompt(prompt, MODEL)


@pytest.mark.parametrize("prompts", [b"ab", {1, 2}, {1: 2}, None, 5])
def test_what_is_no_list_of_prompts(prompts):
    with pytest.raises(ValueError, match=r"prompts=.* must be a string, token ids, or a list"):
        as_prompt_list(prompts)


def test_long_prompts_are_not_printed_whole():
    with pytest.raises(ValueError, match="flat list") as error:
        encode_prompt([0.5] * 100_000, MODEL)
    assert len(str(error.value)) < 200


def test_text():
    with pytest.raises(ValueError, match="no tokenizer"):
        encode_prompt("text", MODEL)


def test_ids_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"token ids \[-1, 251\] outside 0..250"):
        encode_prompt([-1, 251, 3], MODEL)
