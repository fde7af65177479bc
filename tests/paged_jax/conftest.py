"""Shared by the tests of paged_jax."""

import pytest


@pytest.fixture(autouse=True)
def starts_cold(request: pytest.FixtureRequest) -> None:
    """A test finds nothing that another one left in the prefix cache of their module's engine.

    Which tests ran before in the same process depends on how they are distributed.
    """
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").reset_prefix_cache()
