"""Continuous batching over a dense cache: the same engine, and only the cache differs.

A dense cache is a pool whose block is as long as the longest context, so the scheduler, the block
manager, the batches and the sampler are those of the paged engine. A block id is a row's place.
"""

from __future__ import annotations

from typing import Any, NoReturn

from paged_jax.cache import DenseKVCache
from paged_jax.config import EngineConfig, ModelSpec, require
from paged_jax.engine import Engine
from paged_jax.executor import JaxExecutor
from paged_jax.model import Model
from paged_jax.pool import KVPool
from paged_jax.prompts import Prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.step import make_step

DENSE_DTYPES = ("float32", "bfloat16", "float16")


class DenseExecutor(JaxExecutor):
    """Executes plans whose blocks are the regions of a ``DenseKVCache``; arguments as there."""

    def __init__(self, model: Model, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self._step = make_step(model.apply, backend=None, donate=config.donate, is_dense=True)

    @staticmethod
    def _make_pool(spec: ModelSpec, config: EngineConfig, *, num_blocks: int) -> KVPool:
        # The null block has no region.
        return DenseKVCache.create(
            spec, batch_size=num_blocks - 1, capacity=config.block_size, dtype=config.kv_dtype
        ).pool


class DenseEngine(Engine):
    """The engine to compare with: each running sequence has ``max_model_len`` positions of its own.

    It batches at the level of steps, as ``Engine`` does: a row's place goes to the next request
    as soon as the row ends. Requests for one completion only; nothing is shared or preempted.

    Args:
      model: what to run.
      max_num_seqs: rows of the cache: most sequences at once.
      max_model_len: positions of a row: longest context in tokens.
      dtype: element type of the cache: float32, bfloat16 or float16.
      max_num_batched_tokens: most prompt tokens in one step.
      prefill_row_len: tokens a prefill row; prompts are cut into rows of this length.
      seed: as for ``EngineConfig``, like the others.
      check_logits: likewise.
      debug_integrity: likewise.

    Raises:
      ValueError: a value is out of range or does not fit the model.
    """

    _executor_type = DenseExecutor

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        max_model_len: int,
        dtype: str = "float32",
        max_num_batched_tokens: int = 512,
        prefill_row_len: int = 32,
        seed: int = 0,
        check_logits: bool = False,
        debug_integrity: bool = False,
    ) -> None:
        require(dtype in DENSE_DTYPES, f"dtype={dtype!r} must be one of {DENSE_DTYPES}")
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", max_model_len, 1),
            # Rows of one token are taken for decode rows, of which a place has one at most.
            ("prefill_row_len", prefill_row_len, 2),
        ):
            require(
                isinstance(value, int) and value >= least,
                f"{name}={value!r} must be an integer >= {least}",
            )
        config = EngineConfig(
            block_size=max_model_len,
            num_blocks=max_num_seqs + 1,
            kv_dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_row_len=prefill_row_len,
            prefix_cache=False,
            seed=seed,
            check_logits=check_logits,
            debug_integrity=debug_integrity,
        )
        super().__init__(model, config=config)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.executor.pool.nbytes

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> str:
        """See ``Engine.add_request``.

        Raises:
          ValueError: as there, or the request wants several completions or beams.
        """
        num_samples = params.num_samples if isinstance(params, SamplingParams) else 1
        require(
            num_samples == 1,
            f"params ask for {num_samples} sequences (n, best_of or beam_width), must be 1: rows "
            "of a dense cache share nothing",
        )
        return super().add_request(prompt, params, **options)

    def register_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> NoReturn:
        """Refused.

        Raises:
          ValueError: always: rows of a dense cache share nothing.
        """
        raise ValueError("register_prefix must not be called: rows of a dense cache share nothing")
