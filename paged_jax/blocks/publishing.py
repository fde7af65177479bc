"""Putting a sequence's full blocks into the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from paged_jax.blocks.block_pool import NULL_BLOCK, BlockPool
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import PrefixCache


def publish(
    table: BlockTable,
    cache: PrefixCache,
    namespace: Namespace,
    token_ids: Sequence[int],
    *,
    begin: int,
    block_size: int,
) -> int:
    """Cache a table's full blocks as far as ``token_ids`` go; see ``BlockManager.publish``.

    Returns:
      Leading positions whose tokens are cached, in the table's own blocks or in others.

    Raises:
      ValueError: ``begin`` or ``namespace`` does not continue what is published.
    """
    node = table.node if table.node is not None and table.node.is_cached else None
    done = node.depth if node else 0
    if begin % block_size or not 0 <= begin <= done * block_size:
        raise ValueError(
            f"begin={begin} must be a multiple of {block_size} in 0..{done * block_size}"
        )
    if node is not None and node.namespace != namespace:
        raise ValueError(f"namespace={namespace} must be {node.namespace}, as published before")
    for place in range(done, (begin + len(token_ids)) // block_size):
        first = place * block_size - begin
        tokens = tuple(token_ids[first : first + block_size])
        child = cache.child(namespace, node, tokens)
        if child is None:
            block = table.blocks[place]
            if block == NULL_BLOCK:
                break
            child = cache.insert(namespace, node, tokens, block)
        node = child
    table.node = node
    return node.depth * block_size if node else 0


def publish_whole(
    table: BlockTable,
    cache: PrefixCache,
    pool: BlockPool,
    namespace: Namespace,
    token_ids: Sequence[int],
    *,
    block_size: int,
) -> list[int]:
    """Cache all blocks of a table without holes, its partly filled last one too.

    Where equal content is cached already, the table takes over the cached block.

    Returns:
      The table's own blocks that it holds no longer: the caller releases them.

    Raises:
      ValueError: as ``publish``, or it gave back positions of a block that others still hold, who
        may have more tokens there.
    """
    last = table.blocks[-1]
    is_partial = len(token_ids) % block_size != 0
    if is_partial and table.is_trimmed and pool.ref_counts[last] > 1 and not pool.is_kept(last):
        raise ValueError(
            f"token_ids end within block {last}, of which positions were given back: "
            f"{pool.ref_counts[last] - 1} others must not hold it"
        )
    publish(table, cache, namespace, token_ids, begin=0, block_size=block_size)
    node = last_full = table.node
    rest = tuple(token_ids[len(token_ids) // block_size * block_size :])
    # A last block that is cached whole (and was trimmed) is found as it is.
    if rest and not pool.is_kept(table.blocks[-1]):
        node = cache.child(namespace, last_full, rest) or cache.insert(
            namespace, last_full, rest, table.blocks[-1]
        )
    replaced = []
    while node is not None and node.parent is not None:
        place = node.depth - 1
        if table.blocks[place] != node.block:
            pool.share((node.block,))
            replaced.append(table.replace(place, node.block))
        node = node.parent
    return replaced
