"""What a dispatched step yields: device outputs, and their values once somebody waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np

from paged_jax.batch import beam_rows
from paged_jax.outputs import PositionLogprobs
from paged_jax.sampling.beam import BeamCandidates
from paged_jax.sampling.logprobs import TokenLogprobs
from paged_jax.scheduling.beam import Candidate, most_candidates
from paged_jax.scheduling.plan import PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence
from paged_jax.step import StepOutputs


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The values that a plan's step yielded, on the host.

    Attributes:
      token_ids: for each sampling row of the plan its ``num_sampled`` tokens, in
        ``Plan.sampling_rows`` order.
      logprobs: likewise; None where the row asked for none.
      prompt_logprobs: (sequence, position, entry) for prompt positions that asked.
      candidates: the continuations of each beam search that has rows which sample, best first.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[tuple[Sequence, int, PositionLogprobs]]
    candidates: dict[Request, list[Candidate]]


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatch:
    """One program of a step.

    Attributes:
      rows: those that compute; row i is entry i of the outputs.
      branches: those that only sample.
      num_rows: padded number of the first; branch i is entry ``num_rows + i`` of the outputs.
      num_branches: padded number of the second.
      outputs: what they yield, on the device.
      num_each: entries of the outputs that each of the rows has: T where they verify drafts.
    """

    rows: list[PlanRow]
    branches: list[PlanRow]
    num_rows: int
    num_branches: int
    outputs: StepOutputs
    num_each: int = 1

    def sampling_rows(self) -> list[tuple[int, PlanRow]]:
        """Entry in the outputs, and row, of each token that is sampled."""
        sampling = [
            (index * self.num_each + offset, row)
            for index, row in enumerate(self.rows)
            for offset in range(row.num_sampled)
        ]
        return sampling + list(enumerate(self.branches, start=self.num_rows))


@dataclasses.dataclass(slots=True)
class StepHandle:
    """A dispatched step whose values are still on the device.

    Attributes:
      sampling_rows: the plan's, in the order of a result's tokens.
      dispatches: the programs that the plan became.
      check_logits: look for NaN.
      settle: waits for what the step swapped out.
      num_positions: token positions computed, padding included.
      num_real_positions: of those, real tokens.
      pack_seconds: host time in making the arrays.
    """

    sampling_rows: list[PlanRow]
    dispatches: list[Dispatch]
    check_logits: bool
    settle: Callable[[], None] | None = None
    num_positions: int = 0
    num_real_positions: int = 0
    pack_seconds: float = 0.0

    def result(self) -> StepResult:
        """Wait for the step and fetch its values.

        Raises:
          FloatingPointError: a row's logits hold NaN and ``EngineConfig.check_logits`` is set.
        """
        result = StepResult([], [], [], {})
        sampled: dict[Sequence, list[tuple[int, PositionLogprobs | None]]] = {}
        for dispatch in self.dispatches:
            rows, outputs = dispatch.rows, dispatch.outputs
            if self.check_logits:
                _raise_on_nan(rows, np.asarray(outputs.sampled.has_nan))
            if outputs.prompt is not None:
                result.prompt_logprobs.extend(_prompt_entries(rows, outputs.prompt))
            if outputs.beams is not None:
                result.candidates.update(_candidates_of(dispatch, outputs.beams))
            sampling = dispatch.sampling_rows()
            if not sampling:
                continue
            token_ids = np.asarray(outputs.sampled.tokens).tolist()
            entries = _sampled_entries(sampling, outputs, token_ids)
            for index, row in sampling:
                found = token_ids[index], entries.get(index)
                sampled.setdefault(row.sequence, []).append(found)
        if self.settle is not None:
            self.settle()
        # Programs take rows by kind, so their order is not the plan's.
        for row in self.sampling_rows:
            for token_id, entry in sampled[row.sequence]:
                result.token_ids.append(token_id)
                result.logprobs.append(entry)
        return result


def prompt_logprobs_of(row: PlanRow) -> int | None:
    """Best tokens whose log-probabilities are wanted at each prompt position; None: nothing."""
    return row.sequence.request.params.prompt_logprobs


def _raise_on_nan(rows: SequenceOf[PlanRow], has_nan: np.ndarray) -> None:
    bad = [row for row, is_nan in zip(rows, has_nan, strict=False) if is_nan]
    if bad:
        ids = sorted({str(row.sequence.request.request_id) for row in bad})
        raise FloatingPointError(f"NaN logits for {', '.join(ids)}: the model's weights or a bug")


def _sampled_entries(
    rows: SequenceOf[tuple[int, PlanRow]], outputs: StepOutputs, token_ids: list[int]
) -> dict[int, PositionLogprobs]:
    """By entry in the outputs: the log-probabilities of rows that want them."""
    if outputs.sampled.logprobs is None:
        return {}
    chosen, ranks, top_ids, top_logprobs = _fetch(outputs.sampled.logprobs)
    entries: dict[int, PositionLogprobs] = {}
    for index, row in rows:
        wanted = row.sequence.request.params.num_logprobs
        if wanted is not None:
            top = _top(top_ids[index], top_logprobs[index], wanted)
            values = float(chosen[index]), int(ranks[index])
            entries[index] = PositionLogprobs(token_ids[index], *values, top)
    return entries


def _prompt_entries(
    rows: SequenceOf[PlanRow], logprobs: TokenLogprobs
) -> list[tuple[Sequence, int, PositionLogprobs]]:
    chosen, ranks, top_ids, top_logprobs = _fetch(logprobs)
    found = []
    for index, row in enumerate(rows):
        prompt = row.sequence.prompt_token_ids
        wanted = prompt_logprobs_of(row) or 0
        for offset in range(row.num_new):
            position = row.start + offset + 1
            if position >= len(prompt):
                break
            top = _top(top_ids[index, offset], top_logprobs[index, offset], wanted)
            at = (index, offset)
            entry = PositionLogprobs(prompt[position], float(chosen[at]), int(ranks[at]), top)
            found.append((row.sequence, position, entry))
    return found


def _candidates_of(dispatch: Dispatch, beams: BeamCandidates) -> dict[Request, list[Candidate]]:
    """Cut the device's ordered candidates into those of each search."""
    scores, rows, token_ids = (np.asarray(x) for x in (beams.score, beams.row, beams.token))
    num_each = len(scores) // (dispatch.num_rows + dispatch.num_branches)
    found, begin = {}, 0
    for request, members in beam_rows(dispatch.rows).items():
        end = begin + num_each * len(members)
        some = slice(begin, min(end, begin + most_candidates(request)))
        best = dispatch.rows[members.start].sequence.cumulative_logprob
        values = zip(*(x[some].tolist() for x in (scores, rows, token_ids)), strict=True)
        found[request] = [
            Candidate(best + score, row - members.start, token) for score, row, token in values
        ]
        begin = end
    return found


def _fetch(logprobs: TokenLogprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    fields = (logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
    return tuple(np.asarray(field) for field in fields)  # pyright: ignore[reportReturnType]


def _top(ids: np.ndarray, logprobs: np.ndarray, wanted: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:wanted].tolist(), logprobs[:wanted].tolist(), strict=True))
