"""Prompts through a block manager with its prefix cache, and what is cached afterwards."""

from __future__ import annotations

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import PrefixMatch

HERE = Namespace(model="w1")


def table_of(manager: BlockManager, seq_id: int) -> list[int]:
    return manager.table_array(seq_id).tolist()


def run_prompt(
    manager: BlockManager, seq_id: int, tokens: list[int], namespace: Namespace = HERE
) -> PrefixMatch:
    """Look up, allocate, do the step, publish."""
    match = manager.lookup(namespace, tokens)
    assert manager.allocate(seq_id, num_tokens=len(tokens), prefix=match)
    manager.begin_step()
    manager.publish(seq_id, namespace, tokens)
    manager.check_integrity()
    return match


def cached_after(manager: BlockManager, tokens: list[int], namespace: Namespace = HERE) -> int:
    """How many of ``tokens`` are cached, all of them included."""
    return manager.lookup(namespace, [*tokens, -1]).num_tokens
