import pytest

from paged_jax.simulation import assumptions
from paged_jax.simulation.assumptions import DEFAULT


def test_the_record_holds_the_constants_of_the_page():
    for name, value in DEFAULT.values.items():
        if not name.startswith("cost."):
            assert getattr(assumptions, name.upper()) == value
    assert DEFAULT.values["cost.overhead"] == DEFAULT.cost.overhead


def test_scaled_changes_one_constant():
    for name, value in DEFAULT.values.items():
        changed = DEFAULT.scaled(name, 2.0).values
        assert changed.pop(name) == 2 * value
        assert changed.items() <= DEFAULT.values.items()
    assert DEFAULT.scaled("min_len", 0.1).min_len == 1
    with pytest.raises(ValueError, match="name='speed' must be one of"):
        DEFAULT.scaled("speed", 2.0)


def test_variants_are_all_at_half_and_at_double():
    variants = list(DEFAULT.variants())
    assert len(variants) == 2 * len(DEFAULT.values)
    for name, factor, changed in variants:
        assert changed.values[name] == factor * DEFAULT.values[name]
