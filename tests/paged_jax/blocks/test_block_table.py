"""The list and the array of a table stay equal."""

from __future__ import annotations

import numpy as np

from paged_jax.blocks.block_table import BlockTable


def test_array_follows_every_change():
    table = BlockTable([5], num_tokens=1)
    model = [5]
    for block in range(10, 40):
        table.extend([block])
        model.append(block)
        np.testing.assert_array_equal(table.array, np.array(model, np.int32))
    table.extend([1, 2, 3])
    assert table.replace(-1, 9) == 3
    assert table.cut(2) == [*model[2:], 1, 2, 9]
    table.extend([7])
    assert table.array.tolist() == table.blocks == [5, 10, 7]
    assert table.array.dtype == np.int32


def test_copy_changes_on_its_own():
    table = BlockTable([1, 2], num_tokens=5)
    twin = table.copy()
    twin.extend([3])
    twin.replace(-1, 4)
    assert table.array.tolist() == [1, 2]
    assert twin.array.tolist() == [1, 2, 4]
    assert repr(twin) == "BlockTable(blocks=[1, 2, 4], num_tokens=5)"
