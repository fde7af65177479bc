import dataclasses
import json

import pytest

from pallas_kernels.devices import A10, H100, Device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tuned import (
    EXACT_FIELDS,
    TUNED_FOLDER,
    device_name,
    find_config,
    load_table,
    tuned_config,
)

CALL = AttentionCall(
    num_rows=32,
    num_new=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    table_width=128,
    num_blocks=4097,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)


def entry(backend="triton", num_rows=32, num_tokens=2048, **config):
    exact = {field: getattr(CALL, field) for field in EXACT_FIELDS}
    return {
        "backend": backend,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "config": config,
        **exact,
    }


def test_the_nearest_entry_wins():
    entries = [entry(num_rows=64, tile=1), entry(tile=2), entry(num_tokens=4096, tile=3)]
    assert find_config(entries, CALL, backend="triton") == {"tile": 2}
    longer = dataclasses.replace(CALL, table_width=240)
    assert find_config(entries, longer, backend="triton") == {"tile": 3}


def test_no_entry_is_near_enough():
    far = dataclasses.replace(CALL, num_rows=65)
    assert find_config([entry(tile=1)], far, backend="triton") is None
    assert find_config([entry(tile=1)], CALL, backend="mosaic") is None


@pytest.mark.parametrize("field", EXACT_FIELDS)
def test_what_must_be_equal(field):
    value = getattr(CALL, field)
    other = dataclasses.replace(CALL, **{field: "float16" if isinstance(value, str) else 2 * value})
    assert find_config([entry(tile=1)], other, backend="triton") is None


def test_tables_of_a_folder(tmp_path):
    table = {"schema": 1, "entries": [entry(tile=7)]}
    (tmp_path / "h100.json").write_text(json.dumps(table))
    assert tuned_config(CALL, H100, backend="triton", folder=tmp_path) == {"tile": 7}
    assert tuned_config(CALL, A10, backend="triton", folder=tmp_path) is None
    unknown = Device(kind="NVIDIA Z900", compute_capability=(11, 0))
    assert device_name(unknown) is None
    assert tuned_config(CALL, unknown, backend="triton", folder=tmp_path) is None


def test_another_schema_is_refused(tmp_path):
    (tmp_path / "h100.json").write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="has schema 2; must be 1"):
        tuned_config(CALL, H100, backend="triton", folder=tmp_path)


def test_tables_that_are_shipped_load():
    for path in TUNED_FOLDER.glob("*.json"):
        assert load_table(path)
