import numpy as np
import pytest

from paged_jax.simulation.lengths import DATASETS, MAX_PROMPT, MAX_TOTAL, draw_requests, fit_spread


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=[*DATASETS])
def test_means_are_the_papers_and_lengths_in_bounds(dataset):
    requests = draw_requests(dataset, 3000, seed=1)
    assert requests == draw_requests(dataset, 3000, seed=1)
    assert requests != draw_requests(dataset, 3000, seed=2)
    prompts = np.array([request.num_prompt for request in requests])
    outputs = np.array([request.num_output for request in requests])
    np.testing.assert_allclose(prompts.mean(), dataset.mean_prompt, rtol=0.01)
    np.testing.assert_allclose(outputs.mean(), dataset.mean_output, rtol=0.01)
    assert min(prompts.min(), outputs.min()) >= 4
    assert prompts.max() <= MAX_PROMPT
    assert (prompts + outputs).max() <= MAX_TOTAL


def test_spread_is_that_of_the_draws():
    requests = draw_requests(DATASETS["sharegpt"], 20_000, seed=0, prompt_spread=0.4)
    assert fit_spread([request.num_prompt for request in requests]) == pytest.approx(0.4, rel=0.02)


def test_impossible_means():
    with pytest.raises(ValueError, match=r"num_draws=3 must be more, or .* smaller"):
        draw_requests(DATASETS["alpaca"], 3, seed=0, prompt_spread=30.0)
