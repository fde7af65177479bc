"""FasterTransformer-style serving: whole batches, one after the other (the paper's section 6.1)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from paged_jax.blocks.block_stats import MemoryUse
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import Server
from paged_jax.simulation.results import (
    RequestRecord,
    SimulationResult,
    TokenGaps,
    UseMeter,
)
from paged_jax.simulation.settings import SimulationSettings
from paged_jax.simulation.traces import TraceRequest


def simulate_static(
    server: Server,
    requests: Sequence[TraceRequest],
    *,
    settings: SimulationSettings,
    max_model_len: int,
) -> SimulationResult:
    """Serve requests in batches: the earliest that wait, as many as the pool has rows for.

    A row is a region of ``max_model_len`` tokens, as in FasterTransformer, and the batch as large
    as memory allows (paper 6.1). Prompts are padded to the longest. Every row decodes until the
    longest output has ended; nobody joins or leaves before. The answers of a batch are given back
    together, so a request's first token comes with its last, at the batch's end: dynamic batching,
    as the paper puts before FasterTransformer, returns whole batches.

    Args:
      server: the model and what it runs on.
      requests: by arrival.
      settings: pool and constants.
      max_model_len: longest context in tokens.

    Raises:
      ValueError: ``settings`` ask for what this baseline has not got.
    """
    _require_plain(settings)
    num_slots = (settings.resolve_num_blocks(server) - 1) * settings.block_size
    max_rows = min(num_slots // max_model_len, settings.max_num_seqs)
    cost_model = CostModel(server, settings.constants)
    meter, records = UseMeter(), list[RequestRecord]()
    arrivals = [request.arrival for request in requests]
    now = busy_seconds = 0.0
    num_steps = first = 0
    while first < len(requests):
        now = max(now, arrivals[first])
        num_waiting = bisect.bisect_right(arrivals, now, lo=first) - first
        batch = [
            (settings.shared_prefix_len + request.num_prompt, request.num_output)
            for request in requests[first : first + min(num_waiting, max_rows)]
        ]
        seconds = _run_batch(batch, cost_model, meter, row_len=max_model_len, num_slots=num_slots)
        now += seconds
        busy_seconds += seconds
        num_steps += max(num_output for _, num_output in batch)
        for index, (num_prompt, num_output) in enumerate(batch, start=first):
            records.append(
                RequestRecord(
                    request_id=index,
                    arrival=arrivals[index],
                    first_token=now,
                    end=now,
                    num_prompt=num_prompt,
                    num_output=num_output,
                )
            )
        first += len(batch)
    return SimulationResult(
        records=records,
        gaps=TokenGaps(),
        meter=meter,
        num_steps=num_steps,
        busy_seconds=busy_seconds,
        steps=[],
    )


def _run_batch(
    batch: Sequence[tuple[int, int]],
    cost_model: CostModel,
    meter: UseMeter,
    *,
    row_len: int,
    num_slots: int,
) -> float:
    """Seconds that a batch of (prompt, output) lengths takes."""
    num_rows, longest = len(batch), max(num_prompt for num_prompt, _ in batch)
    outputs = [num_output for _, num_output in batch]
    num_prompts = sum(num_prompt for num_prompt, _ in batch)
    num_needed, num_taken = num_prompts + sum(outputs), num_rows * row_len
    total = 0.0
    for step in range(max(outputs)):
        work = RowWork(1, longest + step) if step else RowWork(longest, longest)
        seconds = cost_model.step_time([work] * num_rows, num_sampled=num_rows).total
        total += seconds
        meter.add_batch(seconds, num_requests=num_rows)
        filled = num_prompts + sum(min(step, num_output) for num_output in outputs)
        use = MemoryUse(
            total=num_slots,
            filled=filled,
            reserved=num_needed - filled,
            internal=num_taken - num_needed,
            external=0,
            free=num_slots - num_taken,
            saved=0,
        )
        meter.add_use(seconds, use)
    return total


def _require_plain(settings: SimulationSettings) -> None:
    refused = {
        "num_samples": settings.num_samples > 1,
        "beam_width": settings.beam_width is not None,
        "prefix_cache": settings.prefix_cache,
        "num_host_blocks": settings.num_host_blocks > 0,
        "event_log": settings.event_log is not None,
        "traces_steps": settings.traces_steps,
    }
    for name, is_asked in refused.items():
        if is_asked:
            value = getattr(settings, name)
            raise ValueError(f"{name}={value!r} must be left out with policy='static'")
