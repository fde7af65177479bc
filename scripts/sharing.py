"""What sharing saves on the real block manager: parallel samples, and a prefix cache on traces."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from rich.table import Table

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import PrefixStats
from paged_jax.simulation import lengths
from paged_jax.simulation.traces import TraceRequest

_STATS_EVERY = 8  # steps
_WARM_UP = 4  # requests started for each that runs, before the first look: all start young


def parallel_saving(
    requests: Sequence[TraceRequest], *, num_samples: int, block_size: int, concurrency: int
) -> float:
    """Share of the blocks that parallel sampling saves (paper, Fig. 15), averaged over time.

    A closed loop: ``concurrency`` requests run at any time, and the next starts when one ends. In
    the step of its prompt a request's tables are forked; in each further one every sequence appends
    a token. Every few steps blocks saved / blocks without sharing is taken, from when ages are
    mixed until the last request has started.

    Args:
      requests: in the order in which they start; every sample has the same ``num_output``.
      num_samples: sequences a request.
      block_size: token positions a block.
      concurrency: requests that run at a time.

    Raises:
      ValueError: there are too few requests to look at any step.
    """
    longest = max(request.num_prompt + request.num_output for request in requests)
    manager = BlockManager(
        num_blocks=1 + concurrency * num_samples * -(-longest // block_size),
        block_size=block_size,
    )
    tokens_left: dict[int, int] = {}  # by request, of each sample
    savings: list[float] = []
    num_started = 0
    for step in itertools.count():
        manager.begin_step()
        for request_id in tokens_left:
            for seq_id in range(request_id * num_samples, (request_id + 1) * num_samples):
                assert manager.append(seq_id) is not None, "the pool has room for the longest"
        while len(tokens_left) < concurrency and num_started < len(requests):
            _start(manager, num_started * num_samples, num_samples, requests[num_started])
            tokens_left[num_started] = requests[num_started].num_output
            num_started += 1
        if len(tokens_left) < concurrency:
            break
        if num_started >= _WARM_UP * concurrency and step % _STATS_EVERY == 0:
            stats = manager.stats()
            savings.append(stats.saved / (stats.saved + stats.used))
        for request_id in tokens_left:
            tokens_left[request_id] -= 1
        for request_id in [request_id for request_id, left in tokens_left.items() if left == 0]:
            del tokens_left[request_id]
            for seq_id in range(request_id * num_samples, (request_id + 1) * num_samples):
                manager.free(seq_id)
    if not savings:
        raise ValueError(
            f"requests has {len(requests)}, it must have many times concurrency={concurrency}"
        )
    return sum(savings) / len(savings)


def _start(manager: BlockManager, first_id: int, num_samples: int, request: TraceRequest) -> None:
    has_room = manager.allocate(first_id, num_tokens=request.num_prompt)
    assert has_room, "the pool has room for the longest"
    for seq_id in range(first_id + 1, first_id + num_samples):
        manager.fork(first_id, seq_id)


def replay_prefixes(
    requests: Sequence[TraceRequest], *, block_size: int, num_blocks: int
) -> PrefixStats:
    """Send the prompts of a trace through the prefix cache, one after the other.

    Each is looked up, given a table, published and freed: what it leaves is idle, and evicted when
    blocks are needed.

    Args:
      requests: with ``prefix_ids``, one a block of ``block_size``.
      block_size: token positions a block.
      num_blocks: of the pool, the null block included.

    Raises:
      ValueError: a request has not as many ids as blocks, or does not fit the pool.
    """
    manager = BlockManager(num_blocks=num_blocks, block_size=block_size)
    namespace = Namespace()
    for seq_id, request in enumerate(requests):
        num_needed = manager.blocks_for(request.num_prompt)
        if len(request.prefix_ids) != num_needed or num_needed > manager.num_usable:
            raise ValueError(
                f"requests[{seq_id}] has {len(request.prefix_ids)} ids; it must have one for each "
                f"of its {num_needed} blocks, of at most num_blocks - 1 = {manager.num_usable}"
            )
        tokens = request.token_ids(block_size)
        match = manager.lookup(namespace, tokens)
        has_room = manager.allocate(seq_id, num_tokens=len(tokens), prefix=match)
        assert has_room, "nobody else holds any block"
        manager.begin_step()
        manager.publish(seq_id, namespace, tokens)
        manager.free(seq_id)
    return manager.prefix_stats()


def count_hit_tokens(requests: Sequence[TraceRequest], *, block_size: int) -> int:
    """Tokens that an endless prefix cache hits, from the ids alone.

    Those of the leading run of ids that an earlier prompt had as a full block; never a prompt's
    last token.
    """
    seen: set[int] = set()
    num_hits = 0
    for request in requests:
        leading = itertools.takewhile(seen.__contains__, request.prefix_ids)
        num_hits += min(sum(1 for _ in leading) * block_size, request.num_prompt - 1)
        seen.update(request.prefix_ids[: request.num_prompt // block_size])
    return num_hits


def saving_table(dataset: lengths.Dataset | None, savings: dict[int, float]) -> Table:
    """Memory savings in percent beside the paper's, where there is such a dataset.

    Beams share what their prompts make them share: their figures need a model and real prompts, so
    only the paper's are here.

    Args:
      dataset: whose lengths ``savings`` are for, or None.
      savings: of parallel sampling, as shares, by number of sequences.
    """
    table = Table()
    for name in ("sequences", "saved", *(("paper", "gap", "paper, beam search") * bool(dataset))):
        table.add_column(name, justify="right")
    for num_samples, saving in savings.items():
        cells = [str(num_samples), f"{saving:.1%}"]
        if dataset:
            paper, beam = dataset.parallel.get(num_samples), dataset.beam.get(num_samples)
            cells += [
                "-" if paper is None else f"{paper:.1f}%",
                "-" if paper is None else f"{100 * saving - paper:+.1f} points",
                "-" if beam is None else f"{beam:.1f}%",
            ]
        table.add_row(*cells)
    return table


def prefix_table(
    requests: Sequence[TraceRequest], *, block_size: int, capacities: Collection[int]
) -> Table:
    """Hits by capacity of the pool; the last row's pool never fills, and is checked.

    Args:
      requests: as ``replay_prefixes``.
      block_size: token positions a block.
      capacities: usable blocks of the pools; those that a prompt does not fit are left out.

    Raises:
      RuntimeError: the endless pool's hits are not those counted from the ids.
    """
    table = Table()
    for name in ("blocks", "hit tokens", "of prompt tokens", "evicted blocks"):
        table.add_column(name, justify="right")
    longest = max(len(request.prefix_ids) for request in requests)
    endless = sum(len(request.prefix_ids) for request in requests)
    stats = PrefixStats()
    for capacity in [*sorted(n for n in capacities if longest <= n < endless), endless]:
        stats = replay_prefixes(requests, block_size=block_size, num_blocks=capacity + 1)
        table.add_row(
            f"{capacity:,}" if capacity < endless else "endless",
            f"{stats.hit_tokens:,}",
            f"{stats.hit_tokens / stats.query_tokens:.1%}",
            f"{stats.evictions:,}",
        )
    counted = count_hit_tokens(requests, block_size=block_size)
    if stats.hit_tokens != counted:
        raise RuntimeError(f"{stats.hit_tokens} tokens hit, {counted} counted from the ids")
    table.caption = f"counted from the ids alone: {counted:,}"
    return table
