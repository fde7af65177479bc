"""Shared by all tests: compilations are cached between runs, and the suites can be imported."""

import gc
import os
import pathlib
import sys
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS))  # tests/suites is imported as `suites`

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (the platform is chosen before jax is imported)
import pytest  # noqa: E402

from models import load_model  # noqa: E402
from models.checkpoints import FetchError  # noqa: E402
from paged_jax import Model  # noqa: E402


def pytest_configure() -> None:
    folder = os.environ.get("PAGED_JAX_TEST_COMPILATION_CACHE")
    cache = folder or str(pathlib.Path.home() / ".cache" / "paged_jax" / "test-compilations")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# Every compiled program maps some memory. A process may have 65,530 maps by default, and XLA
# crashes where it gets no more.
MAX_MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Drop compiled programs after a module when the process has many."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real model in float32; without a network the tests that need it are skipped."""
    try:
        return load_model()
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no weights: {error}")
