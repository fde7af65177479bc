"""The dense engine gives the paged engine's tokens, in place, with a region a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import random_prompts

from models.llama import LlamaConfig, as_model, param_shapes, random_params
from paged_jax import DenseKVCache, Engine, EngineConfig, KVPool, SamplingParams, row_state
from paged_jax.baselines import DenseEngine
from paged_jax.batch import BatchLayout
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.step import make_step
from paged_jax_scripts import workload

PROMPT_LENS = [1, 9, 4, 17, 30, 8, 2, 23, 12, 5]
MAX_TOKENS = [5, 1, 8, 3, 10, 30, 2, 7, 4, 9]
PROMPTS = random_prompts(0, PROMPT_LENS)
SIZES = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "prefill_row_len": 8}
MODEL = hash_model.make_model()


def greedy(max_tokens):
    return [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens
    ]


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def dense():
    return DenseEngine(MODEL, max_model_len=40, debug_integrity=True, **SIZES)


def test_tokens_are_exactly_those_of_each_prompt_alone(dense):
    for _ in range(2):  # the second time over regions that others have left
        outputs = dense.generate(PROMPTS, greedy(MAX_TOKENS))
        for prompt, count, tokens in zip(PROMPTS, MAX_TOKENS, tokens_of(outputs), strict=True):
            assert tokens == hash_model.expected_greedy(prompt, count)
    assert not dense.has_unfinished
    assert dense.stats.num_preemptions == 0


def test_a_region_that_holds_nan_changes_nothing(dense):
    kv = dense.executor.pool.blocks
    dense.executor.pool = KVPool(jax.device_put(np.full(kv.shape, np.nan, kv.dtype)))
    (output,) = dense.generate([PROMPTS[4]], greedy([10]))
    assert list(output.token_ids) == hash_model.expected_greedy(PROMPTS[4], 10)


def test_a_place_goes_to_the_next_request_at_once(dense):
    """Five short requests take turns in the two places that a long one leaves, and end before."""
    for index, params in enumerate(greedy([20, 2, 2, 2, 2, 2])):
        dense.add_request([1, 2, index], params, request_id=f"r{index}")
    ended, places = [], set()
    while dense.has_unfinished:
        ended += [output.request_id for output in dense.step() if output.finished]
        tables = [dense.block_manager.table_array(one.seq_id) for one in dense.scheduler.running]
        places |= {int(place) for table in tables for place in table}
        assert all(len(table) == 1 for table in tables)
    assert ended == ["r1", "r2", "r3", "r4", "r5", "r0"]
    assert places == {1, 2, 3}


def test_bytes_are_one_region_a_row(dense):
    assert dense.nbytes == 3 * 40 * MODEL.spec.kv_values_per_token * 4
    assert dense.executor.pool.blocks.shape[1] == 3


def test_one_row_is_enough():
    engine = DenseEngine(MODEL, max_num_seqs=1, max_model_len=40)
    outputs = engine.generate(PROMPTS[:3], greedy([4, 4, 4]))
    assert tokens_of(outputs) == [hash_model.expected_greedy(p, 4) for p in PROMPTS[:3]]


@pytest.mark.long
def test_a_llama_says_the_same_as_with_the_paged_engine():
    """Greedy and sampled requests side by side."""
    config = LlamaConfig.tiny()
    llama = as_model(config, random_params(config, seed=0))
    prompts = [[token % config.vocab_size for token in prompt] for prompt in PROMPTS[:6]]
    params = [
        SamplingParams(temperature=0.8 * (count % 2), top_p=0.9, max_tokens=count, seed=count)
        for count in MAX_TOKENS[:6]
    ]
    paged = Engine(llama, config=EngineConfig(block_size=4, num_blocks=41, **SIZES))
    dense = DenseEngine(llama, max_model_len=60, **SIZES)
    assert tokens_of(dense.generate(prompts, params)) == tokens_of(paged.generate(prompts, params))


@pytest.mark.weights
@pytest.mark.xdist_group("smollm2")
def test_smollm2_says_the_same_as_with_the_paged_engine(smollm2):
    requests = [one for one in workload.load() if len(one.prompt_token_ids) < 120][:3]
    prompts, params = [one.prompt_token_ids for one in requests], greedy([12, 8, 10])
    dense = DenseEngine(smollm2, max_num_seqs=2, max_model_len=256)
    paged = Engine(smollm2, config=EngineConfig(num_blocks=65, max_num_seqs=2))
    assert tokens_of(dense.generate(prompts, params)) == tokens_of(paged.generate(prompts, params))


@pytest.mark.parametrize(("num_rows", "num_new"), [(1, 1), (8, 1), (4, 16)])
def test_steps_work_in_place(num_rows, num_new):
    """The whole cache is aliased, and what is made beside it is small: no layer is copied."""
    config = LlamaConfig.tiny(num_layers=3)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    layout = BatchLayout(
        num_rows=num_rows,
        num_new=num_new,
        table_width=1,
        vocab_size=config.vocab_size,
        is_decode=num_new == 1,
        flags=SamplerFlags(),
    )
    pool = jax.eval_shape(
        lambda: DenseKVCache.create(config.spec, batch_size=8, capacity=2**16).pool
    )
    packed = jax.ShapeDtypeStruct((num_rows, layout.num_columns), jnp.int32)
    state = jax.eval_shape(lambda: row_state.create(8))
    step = make_step(as_model(config, params).apply, backend=None, donate=True, is_dense=True)
    memory = step.lower(params, pool, state, packed, layout=layout).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.02 * pool.nbytes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be an integer >= 1"),
        ({"max_model_len": None}, "max_model_len=None must be an integer >= 1"),
        ({"max_model_len": 4096}, "max_model_len=4096 must be at most the model's 2048"),
        ({"dtype": "int8"}, r"dtype='int8' must be one of \('float32', 'bfloat16', 'float16'\)"),
        ({"prefill_row_len": 1}, "prefill_row_len=1 must be an integer >= 2"),
    ],
)
def test_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        DenseEngine(MODEL, **{"max_num_seqs": 2, "max_model_len": 64, **sizes})


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1] * 40, {}, "a prompt of 40 tokens must leave room for one new token in max_model_len="),
        ([], {}, r"prompt_token_ids=\[\] must hold at least one token"),
        ([999], {}, r"token ids \[999\] outside 0..250"),
        ([1], {"n": 2}, r"params ask for 2 sequences .* must be 1: rows of a dense cache share"),
        ([1], {"beam_width": 2}, "params ask for 2 sequences"),
    ],
)
def test_requests_are_refused(dense, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        dense.add_request(prompt, SamplingParams(**params))
    assert not dense.has_unfinished


def test_no_prefix_is_shared(dense):
    with pytest.raises(ValueError, match="rows of a dense cache share nothing"):
        dense.register_prefix([1, 2, 3])
