import numpy as np
import pytest

from paged_jax.sampling.inputs import SamplerFlags, pack_inputs, sampler_flags
from paged_jax.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_flags_are_the_least_that_serve_all_rows():
    assert sampler_flags([GREEDY]) == SamplerFlags()
    assert sampler_flags([]) == SamplerFlags()
    assert not sampler_flags([GREEDY, SamplingParams()]).greedy_only
    assert sampler_flags([GREEDY, SamplingParams(presence_penalty=1)]).penalties
    assert sampler_flags([GREEDY], banned=[[2, 7]]).bias_width == 16
    wide = SamplingParams(logit_bias=dict.fromkeys(range(15), 1.0))
    assert sampler_flags([GREEDY, wide], banned=[[], [2]]).bias_width == 16
    assert sampler_flags([GREEDY, wide], banned=[[], [2, 7]]).bias_width == 512
    for asked, width in [(0, 0), (1, 5), (5, 5), (6, 20), (20, 20)]:
        rows = [GREEDY, SamplingParams(logprobs=asked)]
        assert sampler_flags(rows).num_logprobs == width


def test_flags_refuse_other_widths():
    with pytest.raises(ValueError, match=r"bias_width=3 must be one of \(0, 16, 512\)"):
        SamplerFlags(bias_width=3)
    with pytest.raises(ValueError, match=r"num_logprobs=3 must be None or one of"):
        SamplerFlags(num_logprobs=3)
    with pytest.raises(ValueError, match=r"bias_width=513 must be at most 512"):
        sampler_flags([GREEDY], banned=[range(513)])


def test_pack_pads_with_greedy_rows_and_harmless_biases():
    rows = [
        SamplingParams(
            temperature=0.5,
            top_k=10**12,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            logit_bias={4: 2.0},
        )
    ]
    packed = pack_inputs(rows, num_rows=3, bias_width=16, banned=[[7]])
    np.testing.assert_allclose(packed.temperature, [0.5, 0, 0])
    assert packed.top_k.tolist() == [2**31 - 1, 0, 0]
    np.testing.assert_allclose(packed.top_p, [0.9, 1, 1])
    np.testing.assert_allclose(packed.min_p, [0.1, 0, 0])
    np.testing.assert_allclose(packed.repetition, [1.2, 1, 1])
    np.testing.assert_allclose(packed.presence, [0.3, 0, 0])
    np.testing.assert_allclose(packed.frequency, [-0.4, 0, 0])
    assert packed.bias_ids[0, :3].tolist() == [4, 7, 0]
    assert packed.bias_values[0, :3].tolist() == [2.0, -np.inf, 0]
    assert not packed.bias_values[1:].any()
    assert packed.temperature.dtype == np.float32
    assert packed.top_k.dtype == packed.bias_ids.dtype == np.int32


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"num_rows=1 must be at least 2"):
        pack_inputs([GREEDY, GREEDY], num_rows=1, bias_width=0)
    with pytest.raises(ValueError, match=r"bias_width=0 must be >= 1"):
        pack_inputs([GREEDY], num_rows=1, bias_width=0, banned=[[3]])
