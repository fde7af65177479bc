"""What an engine is made of on the host, from its settings and its model."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.events import BlockEvent
from paged_jax.blocks.reservation import make_manager
from paged_jax.config import EngineConfig, require
from paged_jax.host_pool import resolve_num_host_blocks
from paged_jax.model import Model
from paged_jax.pool import bytes_per_block
from paged_jax.scheduling.ngram import NgramDrafter
from paged_jax.scheduling.preemption import PreemptionCosts, default_costs
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.window import most_blocks
from pallas_kernels.devices import current_device


def make_block_manager(
    config: EngineConfig,
    model: Model,
    *,
    num_blocks: int,
    max_model_len: int,
    observer: Callable[[BlockEvent], None] | None,
) -> BlockManager:
    """The tables, for a pool of ``num_blocks`` blocks, the null block included.

    Raises:
      ValueError: the host pool would hold no block, or the pool no region of ``max_model_len``
        tokens where the reservation needs one.
    """
    return make_manager(
        config.reservation,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_host_blocks=resolve_num_host_blocks(
            config, num_blocks=num_blocks, block_nbytes=_block_nbytes(config, model)
        ),
        tracks_freed=config.zero_on_free,
        observer=observer,
    )


def make_scheduler(
    config: EngineConfig, model: Model, manager: BlockManager, *, max_model_len: int
) -> Scheduler:
    """The scheduler of these tables, for contexts up to ``max_model_len`` tokens."""
    preemptor = Preemptor(
        manager,
        mode=config.preemption,
        costs=_preemption_costs(config, model),
        block_nbytes=_block_nbytes(config, model),
    )
    return Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_row_len=config.prefill_row_len,
        prefill_chunk_len=config.prefill_chunk_len,
        max_model_len=max_model_len,
        window=model.spec.window,
        preemptor=preemptor,
        drafter=None if config.speculation is None else NgramDrafter(config.speculation),
        prefix_cache=config.prefix_cache,
    )


def resolve_max_model_len(config: EngineConfig, model: Model, num_blocks: int) -> int:
    """Longest context in tokens: of the settings or the model, and never more than fits the pool.

    Raises:
      ValueError: the settings want more than the model was made for.
    """
    longest = model.spec.max_position
    require(
        config.max_model_len is None or config.max_model_len <= longest,
        f"max_model_len={config.max_model_len} must be at most the model's {longest}",
    )
    wanted = config.max_model_len or longest
    if most_blocks(wanted, model.spec.window, config.block_size) < num_blocks:
        return wanted
    return (num_blocks - 1) * config.block_size


def check_priority(priority: int, config: EngineConfig) -> None:
    """Refuse a priority that is no integer, or that would have no effect.

    Raises:
      ValueError: it is such.
    """
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    require(is_int, f"priority={priority!r} must be an integer")
    require(
        priority == 0 or config.scheduling == "priority",
        f"priority={priority} must be 0 with scheduling={config.scheduling!r}",
    )


def _preemption_costs(config: EngineConfig, model: Model) -> PreemptionCosts | None:
    """What the policy 'auto' goes by, from the settings or for this device and model."""
    if config.preemption != "auto" or config.preemption_costs is not None:
        return config.preemption_costs
    device = current_device()
    num_params = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(model.params))
    rate = device.matmul_rate if device.is_cuda else None
    return default_costs(num_params=num_params, matmul_rate=rate)


def _block_nbytes(config: EngineConfig, model: Model) -> int:
    return bytes_per_block(
        model.spec,
        block_size=config.block_size,
        dtype=config.kv_dtype,
        head_dim=config.pool_head_dim,
    )
