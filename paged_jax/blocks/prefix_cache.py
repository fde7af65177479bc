"""The prefix cache: which blocks hold the keys and values of which tokens (paper section 4.4)."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paged_jax.blocks.block_pool import BlockPool
from paged_jax.blocks.namespace import Namespace


class PartialMatch(NamedTuple):
    """A cached block of which only the first ``num_tokens`` positions are wanted: to be copied."""

    block: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is cached of a prompt; good until the next change of the block manager.

    Attributes:
      blocks: full blocks to share, in logical order.
      num_tokens: positions that need not be computed, the partial block's included.
      partial: the block to copy for the positions after ``blocks``, or None.
      num_query_tokens: tokens of the prompt that was looked up.
      node_ids: the cache's nodes behind ``blocks`` and ``partial``; ids are never used again.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    partial: PartialMatch | None = None
    num_query_tokens: int = 0
    node_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixStats:
    """What the cache was good for.

    Attributes:
      queries: sequences that were given a table after a lookup.
      query_tokens: tokens of their prompts.
      hit_tokens: those of them that need not be computed.
      evictions: cached blocks given up for want of free ones.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

    def count(self, match: PrefixMatch) -> PrefixStats:
        """With one more query."""
        return dataclasses.replace(
            self,
            queries=self.queries + 1,
            query_tokens=self.query_tokens + match.num_query_tokens,
            hit_tokens=self.hit_tokens + match.num_tokens,
        )


class CachedNode:
    """One cached block in the tree of prefixes; a root stands for a namespace and has no block.

    Attributes:
      node_id: never used again, even after the node is gone.
      tokens: what the block holds; fewer than a block's only in a registered prefix's last one.
      depth: blocks from the root, itself included: its place in a table is ``depth - 1``.
      children: by tokens.
      order: the children's tokens, sorted.
      is_cached: False once it has left the tree.
    """

    __slots__ = (
        "block",
        "children",
        "depth",
        "is_cached",
        "namespace",
        "node_id",
        "order",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        node_id: int,
        namespace: Namespace,
        *,
        parent: CachedNode | None = None,
        tokens: tuple[int, ...] = (),
        block: int = 0,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[tuple[int, ...], CachedNode] = {}
        self.order: list[tuple[int, ...]] = []
        self.is_cached = True

    def closest(self, tokens: tuple[int, ...]) -> tuple[CachedNode | None, int]:
        """The child with the longest common beginning with ``tokens``, and its length."""
        # In a sorted list the longest common beginning is beside the place where it would stand.
        place = bisect.bisect_left(self.order, tokens)
        best, best_len = None, 0
        for near in self.order[max(place - 1, 0) : place + 1]:
            length = _common_len(near, tokens)
            if length > best_len:
                best, best_len = self.children[near], length
        return best, best_len

    def subtree(self) -> Iterator[CachedNode]:
        """The node and all below it, a parent before its children."""
        line: list[CachedNode] = [self]
        while line:
            node = line.pop()
            line.extend(node.children.values())
            yield node

    def __repr__(self) -> str:
        return f"CachedNode({self.node_id}, block={self.block}, depth={self.depth})"


class PrefixCache:
    """Cached blocks in a tree, one root a namespace, found by comparing the tokens themselves.

    A path from a root spells a prompt's beginning, so equal tokens after different beginnings are
    different nodes. A cached block stays while somebody refers to it; when idle it may be evicted:
    the longest idle one without children first.

    Args:
      pool: where the blocks are; cached ones are *kept* there.
      block_size: token positions a block (S).
    """

    __slots__ = ("_block_size", "_by_block", "_next_id", "_nodes", "_pool", "_roots", "evictions")

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[Namespace, CachedNode] = {}
        self._nodes: dict[int, CachedNode] = {}
        self._by_block: dict[int, CachedNode] = {}
        self._next_id = 1
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def lookup(self, namespace: Namespace, token_ids: Sequence[int]) -> PrefixMatch:
        """Find the longest cached beginning of a prompt, its last token left out.

        Raises:
          ValueError: there are no tokens.
        """
        if not len(token_ids):
            raise ValueError("token_ids must hold at least one token")
        size, limit = self._block_size, len(token_ids) - 1
        node = self._roots.get(namespace)
        if node is None:
            return PrefixMatch(num_query_tokens=len(token_ids))
        path: list[CachedNode] = []
        begin = 0
        while begin + size <= limit:
            child = node.children.get(tuple(token_ids[begin : begin + size]))
            if child is None:
                break
            path.append(child)
            node, begin = child, begin + size
        blocks = tuple(child.block for child in path)
        partial = None
        near, length = node.closest(tuple(token_ids[begin : min(begin + size, limit)]))
        if near is not None:
            partial = PartialMatch(near.block, length)
            path.append(near)
        node_ids = tuple(child.node_id for child in path)
        return PrefixMatch(blocks, begin + length, partial, len(token_ids), node_ids)

    def node_of(self, block: int) -> CachedNode | None:
        """The node of a cached block."""
        return self._by_block.get(block)

    def require_current(self, match: PrefixMatch) -> None:
        """Refuse a match that is out of date.

        Raises:
          ValueError: a block of ``match`` has left the cache since.
        """
        for node_id in match.node_ids:
            if node_id not in self._nodes:
                raise ValueError(
                    f"prefix={match} must be looked up again: its node {node_id} left the cache"
                )

    def child(
        self, namespace: Namespace, node: CachedNode | None, tokens: tuple[int, ...]
    ) -> CachedNode | None:
        """The cached node of ``tokens`` below ``node`` (None: at the beginning), or None."""
        parent = self._roots.get(namespace) if node is None else node
        return None if parent is None else parent.children.get(tokens)

    def insert(
        self, namespace: Namespace, node: CachedNode | None, tokens: tuple[int, ...], block: int
    ) -> CachedNode:
        """Cache ``block``, which somebody refers to, as what follows ``node``.

        Raises:
          ValueError: the block is cached already, as other tokens or in another place.
        """
        if block in self._by_block:
            raise ValueError(
                f"token_ids must be what block {block} holds: it is cached with the tokens "
                f"{self._by_block[block].tokens}, not {tokens}"
            )
        self._pool.keep(block)
        parent = node or self._roots.get(namespace)
        if parent is None:
            parent = self._roots[namespace] = CachedNode(self._new_id(), namespace)
        new = CachedNode(self._new_id(), namespace, parent=parent, tokens=tokens, block=block)
        parent.children[tokens] = new
        bisect.insort(parent.order, tokens)
        self._nodes[new.node_id] = self._by_block[block] = new
        return new

    def forget(self, block: int) -> list[int]:
        """Take a block and all that follow it out of the cache; those that are idle become free.

        Returns:
          All of them.
        """
        top = self._by_block[block]
        parent = top.parent
        assert parent is not None, "a root has no block"
        del parent.children[top.tokens]
        del parent.order[bisect.bisect_left(parent.order, top.tokens)]
        forgotten = []
        for node in top.subtree():
            node.is_cached = False
            forgotten.append(node.block)
            del self._nodes[node.node_id], self._by_block[node.block]
            self._pool.unkeep(node.block)
        if parent.parent is None and not parent.children:
            parent.is_cached = False
            del self._roots[parent.namespace]
        return forgotten

    def evict(self) -> list[int]:
        """Make at least one idle block free, which must exist; returns what left the cache.

        The longest idle one without children goes first. Where every idle block has children in
        use (their tables gave up their beginnings), the deepest goes, and those children stay with
        their holders as blocks that are not cached.
        """
        idle = self._pool.idle
        for _ in range(len(idle)):
            block = next(iter(idle))
            if not self._by_block[block].children:
                break
            # Used no earlier than what follows it.
            del idle[block]
            idle[block] = None
        else:
            block = max(idle, key=lambda block: self._by_block[block].depth)
        self.evictions += 1
        return self.forget(block)

    @property
    def next_id(self) -> int:
        """Id of the node that is made next."""
        return self._next_id

    def blocks_since(self, node_id: int) -> list[int]:
        """Cached blocks of the nodes from ``node_id`` on, in the order in which they came."""
        blocks: list[int] = []
        for new_id in reversed(self._nodes):
            if new_id < node_id:
                break
            blocks.append(self._nodes[new_id].block)
        return blocks[::-1]

    def nodes(self) -> Iterator[CachedNode]:
        """All cached nodes, roots left out."""
        return iter(self._by_block.values())

    def check_integrity(self) -> None:
        """Prove that the tree, its indexes and the pool agree.

        Raises:
          RuntimeError: with the node, if not.
        """
        seen = 0
        for namespace, root in self._roots.items():
            below = list(root.subtree())[1:]
            _check(bool(below) and root.namespace == namespace, root)
            seen += len(below)
            for node in below:
                parent = node.parent
                _check(
                    parent is not None
                    and parent.children.get(node.tokens) is node
                    and node.depth == parent.depth + 1
                    and node.namespace == namespace
                    and node.is_cached
                    and self._nodes.get(node.node_id) is self._by_block.get(node.block) is node
                    and self._pool.is_kept(node.block)
                    and 0 < len(node.tokens) <= self._block_size
                    and node.order == sorted(node.children)
                    and not (node.children and len(node.tokens) < self._block_size),
                    node,
                )
        if not seen == len(self._nodes) == len(self._by_block) or any(
            block not in self._by_block for block in self._pool.idle
        ):
            raise RuntimeError(
                f"{seen} nodes in the tree, {len(self._nodes)} by id, {len(self._by_block)} by "
                f"block, idle blocks {list(self._pool.idle)}"
            )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


def _check(holds: bool, node: CachedNode) -> None:
    if not holds:
        raise RuntimeError(
            f"cached {node} with tokens {node.tokens} does not fit its parent {node.parent}, its "
            f"children {list(node.children)} or the pool"
        )
