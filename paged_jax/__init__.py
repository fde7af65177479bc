"""PagedAttention for JAX: Flax models that decode against one preallocated pool of KV blocks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.baselines.lockstep import BaselineRun
    from paged_jax.cache import DenseKVCache, KVCache, PagedKVCache
    from paged_jax.comparison import Comparison, compare
    from paged_jax.config import EngineConfig, ModelSpec, NgramSpeculation
    from paged_jax.engine import Engine
    from paged_jax.metrics import EngineStats, count_compilations
    from paged_jax.model import Model, Tokenizer
    from paged_jax.outputs import Completion, PositionLogprobs, PrefixHandle, RequestOutput
    from paged_jax.pool import KVPool
    from paged_jax.sampling.params import SamplingParams
    from paged_jax.scheduling.preemption import PreemptionCosts

# Names are imported when they are first used: the host side (``paged_jax.blocks``,
# ``paged_jax.scheduling``) is plain Python and can be used without importing jax.
_MODULES = {
    "BaselineRun": "baselines.lockstep",
    "Comparison": "comparison",
    "Completion": "outputs",
    "DenseKVCache": "cache",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineStats": "metrics",
    "KVCache": "cache",
    "KVPool": "pool",
    "Model": "model",
    "ModelSpec": "config",
    "NgramSpeculation": "config",
    "PagedKVCache": "cache",
    "PositionLogprobs": "outputs",
    "PreemptionCosts": "scheduling.preemption",
    "PrefixHandle": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling.params",
    "Tokenizer": "model",
    "compare": "comparison",
    "count_compilations": "metrics",
}

__all__ = [
    "BaselineRun",
    "Comparison",
    "Completion",
    "DenseKVCache",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "KVCache",
    "KVPool",
    "Model",
    "ModelSpec",
    "NgramSpeculation",
    "PagedKVCache",
    "PositionLogprobs",
    "PreemptionCosts",
    "PrefixHandle",
    "RequestOutput",
    "SamplingParams",
    "Tokenizer",
    "compare",
    "count_compilations",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
