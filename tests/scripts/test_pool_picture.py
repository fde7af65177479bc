import numpy as np
from suites import hash_model

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax_scripts.pool_picture import PoolSnapshot, draw, take_snapshot


def test_letters_and_free_cells():
    snapshot = PoolSnapshot(num_usable=6, owners={1: (0, 4), 4: (1, 4), 5: (0, 1)}, block_size=4)
    assert draw(snapshot, columns=3).plain == "A··\nBa·"


def test_snapshot_of_an_engine():
    config = EngineConfig(block_size=4, num_blocks=9, max_num_seqs=2)
    engine = Engine(hash_model.make_model(), config=config)
    prompts = [np.arange(6).tolist(), np.arange(3).tolist()]
    ids = engine.add_requests(prompts, SamplingParams(max_tokens=4))
    engine.step()
    snapshot = take_snapshot(engine, {ids[0]: 0, ids[1]: 1})
    filled = sorted(snapshot.owners.values())
    assert filled == [(0, 2), (0, 4), (1, 3)]
