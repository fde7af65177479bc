"""Beam searches without a device: what may follow the content of a context's slots."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as SequenceOf

import numpy as np
from suites import dense_beam
from suites.slot_model import VOCAB_SIZE, encode

from paged_jax.scheduling.beam import Candidate, most_candidates
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import PlanRow
from paged_jax.scheduling.request import Request


def next_logprobs(context: np.ndarray) -> np.ndarray:
    """What beams see of the model: eighths, so that sums are exact; the other tokens' hash."""
    seed = context.tobytes()
    return np.array([-(zlib.crc32(seed, 1000 + i) % 4096) / 8 for i in range(VOCAB_SIZE)])


def search_alone(request: Request, *, max_tokens: int) -> list[dense_beam.State]:
    """The states of a beam search that has the machine to itself."""
    params, banned = request.params, sorted(request.stop_ids | request.eos_token_ids)

    def logprobs_of(outputs: list[list[int]]) -> np.ndarray:
        contexts = [encode([*request.prompt_token_ids, *output]) for output in outputs]
        logprobs = np.stack([next_logprobs(context) for context in contexts])
        if len(outputs[0]) < params.min_tokens:
            logprobs[:, banned] = -np.inf
        return logprobs

    search = dense_beam.Search(
        width=params.beam_width,
        max_tokens=max_tokens,
        ends=request.stop_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    return dense_beam.run(search, logprobs_of)


def sums_after(row: PlanRow, context: np.ndarray) -> np.ndarray:
    """Sums of log-probabilities of a beam's continuations by each token."""
    sequence, request = row.sequence, row.sequence.request
    sums = next_logprobs(context) + sequence.cumulative_logprob
    if sequence.num_output < request.params.min_tokens:
        sums[sorted(request.stop_ids | request.eos_token_ids)] = -np.inf
    return sums


def best_candidates(request: Request, sums: SequenceOf[np.ndarray]) -> list[Candidate]:
    """The candidates that the device gives back, of beams in rank order."""
    flat = np.concatenate(sums)
    order = np.argsort(-flat, kind="stable")[: most_candidates(request)]
    return [Candidate(flat[i], *divmod(int(i), VOCAB_SIZE)) for i in order]


def check_search(group: SequenceGroup) -> None:
    """The hypotheses of a search that has ended are those that it would have found alone."""
    assert group.beam is not None
    request, first = group.request, group.sequences[0]
    states = search_alone(request, max_tokens=first.max_tokens)
    found = group.beam.hypotheses
    expected = states[-1].hypotheses
    if first.finish_reason == "cancelled":
        state = states[group.beam.beams[0].num_output]
        expected = sorted([*state.hypotheses, *state.beams], key=lambda one: -one.score)
    width = request.params.beam_width
    assert [(one.token_ids, one.logprob, one.score) for one in found] == [
        (one.tokens, one.logprob, one.score) for one in expected[:width]
    ], group
    assert [one.finish_reason == "stop" for one in found] == [
        one.has_ended for one in expected[:width]
    ]
    assert [one.stop_reason for one in found] == [
        one.tokens[-1] if one.has_ended else None for one in expected[:width]
    ]
