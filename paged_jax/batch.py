"""The only door from host to device: the rows of a plan become one padded int32 array.

One array means one transfer a step, whatever the rows ask for. Floats travel as their bit patterns.
``pack`` (numpy, host) and ``unpack`` (jax, inside the step) are each other's inverse.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from paged_jax.sampling.beam import NO_GROUP, BeamRows
from paged_jax.sampling.inputs import SamplerFlags, SamplerInputs
from paged_jax.sampling.noise import base_key
from paged_jax.scheduling.plan import PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence

# Columns that change every step, then those that a sequence keeps while it is resident.
STEP_COLUMNS = ("state_slot", "start", "num_new", "samples", "logits_row", "host_token")
INT_COLUMNS = ("key_high", "key_low", "first_position", "top_k")
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
BEAM_COLUMNS = ("group", "score")
FLOAT_FIELDS = (*FLOAT_COLUMNS[:3], *(f"{name}_penalty" for name in FLOAT_COLUMNS[3:]))
NUM_STEP = len(STEP_COLUMNS)
NUM_RESIDENT = len(INT_COLUMNS) + len(FLOAT_COLUMNS)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """The static shape of a packed batch; one compiled step each.

    Attributes:
      num_rows: padded rows that compute (B).
      num_new: padded new tokens a row (T).
      table_width: padded blocks a row (M).
      vocab_size: entries of the logits (V).
      is_decode: the tokens are the device's own last samples, not the host's.
      flags: which sampling features the rows use.
      prompt_logprobs: top-N kept for every prompt position, or None for none.
      num_branches: padded rows that only sample, from other rows' logits (F). They follow the B.
      num_candidates: continuations kept of each beam, 0 where no row is a beam.
      verifies: each of a row's T positions samples a token: the rows hold drafts.
    """

    num_rows: int
    num_new: int
    table_width: int
    vocab_size: int
    is_decode: bool
    flags: SamplerFlags
    prompt_logprobs: int | None = None
    num_branches: int = 0
    num_candidates: int = 0
    verifies: bool = False

    @property
    def num_token_columns(self) -> int:
        """Columns that hold token ids: the row's tokens and, for prompt logprobs, their targets."""
        if self.is_decode:
            return 0
        return self.num_new * (1 if self.prompt_logprobs is None else 2)

    @property
    def table_offset(self) -> int:
        """Column where the block table begins."""
        return NUM_STEP + NUM_RESIDENT + self.num_token_columns + 2 * self.flags.bias_width

    @property
    def beam_offset(self) -> int:
        """Column where the beams' columns begin, if there are any."""
        return self.table_offset + self.table_width

    @property
    def num_columns(self) -> int:
        """Width of the packed array."""
        return self.beam_offset + (len(BEAM_COLUMNS) if self.num_candidates else 0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "state_slot", "start", "num_new", "samples", "logits_row", "host_token", "base_key",
        "first_position", "sampler", "tokens", "targets", "block_tables", "beams",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """A packed batch, unpacked on the device: B rows compute, and N = B + F rows may sample.

    Attributes:
      state_slot: entry in ``RowState``; padding rows point to the dummy entry R.
      start: position of the row's first new token.
      num_new: real new tokens; 0 marks a padding row.
      samples: the row's last position (or each, where the layout verifies) yields a token.
      logits_row: the row from whose logits this one samples: its own, but for branches.
      host_token: in decode, the input token of a row whose state starts anew; else -1.
      base_key: key of the sequence's random stream.
      first_position: output position of the token that a row samples whose state starts anew.
      sampler: the rows' sampling parameters.
      tokens: token ids (None in decode, where they come from ``RowState``).
      targets: the prompt's next token at each position, 0 where there is none.
      block_tables: blocks in logical order.
      beams: which rows are beams of which search (None where no row is a beam).
    """

    state_slot: Int[Array, "N"]
    start: Int[Array, "B"]
    num_new: Int[Array, "B"]
    samples: Bool[Array, "N"]
    logits_row: Int[Array, "N"]
    host_token: Int[Array, "N"]
    base_key: UInt32[Array, "N 2"]
    first_position: Int[Array, "N"]
    sampler: SamplerInputs
    tokens: Int[Array, "B T"] | None
    targets: Int[Array, "B T"] | None
    block_tables: Int[Array, "B M"]
    beams: BeamRows | None


def unpack(packed: Int[Array, "N C"], layout: BatchLayout) -> StepInputs:
    """Undo ``pack`` inside the step."""
    names = STEP_COLUMNS + INT_COLUMNS + FLOAT_COLUMNS
    column = {name: packed[:, index] for index, name in enumerate(names)}

    def as_float(bits: Any) -> Any:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    position = NUM_STEP + NUM_RESIDENT

    def take(width: int) -> Any:
        nonlocal position
        position += width
        return packed[:, position - width : position]

    has_targets = layout.prompt_logprobs is not None
    computing = slice(layout.num_rows)
    tokens = None if layout.is_decode else take(layout.num_new)[computing]
    targets = take(layout.num_new)[computing] if has_targets else None
    sampler = SamplerInputs(
        top_k=column["top_k"],
        bias_ids=take(layout.flags.bias_width),
        bias_values=as_float(take(layout.flags.bias_width)),
        **{name: as_float(column[name]) for name in FLOAT_COLUMNS},
    )
    key = jnp.stack([column["key_high"], column["key_low"]], axis=1)
    block_tables = take(layout.table_width)[computing]
    beams = None
    if layout.num_candidates:
        group, score = take(1)[:, 0], as_float(take(1)[:, 0])
        beams = BeamRows(group=group, score=score)
    return StepInputs(
        state_slot=column["state_slot"],
        start=column["start"][computing],
        num_new=column["num_new"][computing],
        samples=column["samples"] != 0,
        logits_row=column["logits_row"],
        host_token=column["host_token"],
        base_key=jax.lax.bitcast_convert_type(key, jnp.uint32),
        first_position=column["first_position"],
        sampler=sampler,
        tokens=tokens,
        targets=targets,
        block_tables=block_tables,
        beams=beams,
    )


class BatchPacker:
    """Packs rows; remembers each resident sequence's constant columns by its state slot.

    Args:
      num_slots: entries of ``RowState`` (R); slot R is the padding rows' own.
      table_width: padded blocks a row (M).
      table_of: the block manager's table of a sequence id, as an int32 array.
      seed_of: the 64-bit seed of a sequence.
    """

    __slots__ = ("_num_slots", "_owners", "_resident", "_seed_of", "_table_of", "_table_width")

    def __init__(
        self,
        *,
        num_slots: int,
        table_width: int,
        table_of: Callable[[int], np.ndarray],
        seed_of: Callable[[Sequence], int],
    ) -> None:
        self._num_slots = num_slots
        self._table_width = table_width
        self._table_of = table_of
        self._seed_of = seed_of
        self._resident = np.zeros((num_slots + 1, NUM_RESIDENT), np.int32)
        self._owners: list[Sequence | None] = [None] * num_slots

    def pack(
        self,
        rows: SequenceOf[PlanRow],
        layout: BatchLayout,
        *,
        branches: SequenceOf[PlanRow] = (),
    ) -> np.ndarray:
        """Return ``[num_rows + num_branches, num_columns]`` int32; the rest is padding.

        Args:
          rows: those that compute.
          layout: the padded shape.
          branches: rows that sample from the logits of their request's sampling row in ``rows``.
        """
        num_rows = layout.num_rows
        packed = np.zeros((num_rows + layout.num_branches, layout.num_columns), np.int32)
        packed[:, 0] = self._num_slots
        packed[:, NUM_STEP - 1] = -1
        table_offset = layout.table_offset
        for index, row in enumerate(rows):
            sequence, target = row.sequence, packed[index]
            if row.samples and (row.from_host or not layout.is_decode):
                self._load_resident(sequence)
            host_token = row.token_ids[0] if row.from_host else -1
            # Only rows that sample touch their state; a prompt's earlier rows use the dummy entry.
            slot = sequence.state_slot if row.samples else self._num_slots
            step = slot, row.start, row.num_new, row.samples, index, host_token
            target[:NUM_STEP] = step
            table = self._table_of(sequence.seq_id)
            num_entries = min(len(table), self._table_width)
            target[table_offset : table_offset + num_entries] = table[:num_entries]
        self._pack_resident(packed[: len(rows)])
        if branches:
            self._pack_branches(packed[num_rows : num_rows + len(branches)], rows, branches)
        if not layout.is_decode:
            self._pack_tokens(packed, rows, layout)
        if layout.flags.bias_width:
            self._pack_biases(packed, rows, layout)
            self._pack_biases(packed[num_rows:], branches, layout)
        if layout.num_candidates:
            pack_beams(packed[:, layout.beam_offset :], rows)
        return packed

    def _pack_branches(
        self, packed: np.ndarray, rows: SequenceOf[PlanRow], branches: SequenceOf[PlanRow]
    ) -> None:
        sampling = {row.sequence.request: index for index, row in enumerate(rows) if row.samples}
        for target, row in zip(packed, branches, strict=True):
            self._load_resident(row.sequence)
            logits_row = sampling[row.sequence.request]
            target[:NUM_STEP] = (row.sequence.state_slot, row.start, 0, True, logits_row, -1)
        self._pack_resident(packed)

    def _load_resident(self, sequence: Sequence) -> None:
        if self._owners[sequence.state_slot] is sequence:
            # Rows from the host start anew each time; a key takes 0.1 ms to make.
            place = INT_COLUMNS.index("first_position")
            self._resident[sequence.state_slot, place] = sequence.num_output
            return
        self._owners[sequence.state_slot] = sequence
        params = sequence.request.params
        key = base_key(self._seed_of(sequence), sequence.sample_index).view(np.int32)
        top_k = min(max(params.top_k, 0), 2**31 - 1)
        values = self._resident[sequence.state_slot]
        values[: len(INT_COLUMNS)] = (*key, sequence.num_output, top_k)
        floats = np.array([getattr(params, name) for name in FLOAT_FIELDS], np.float32)
        values[len(INT_COLUMNS) :] = floats.view(np.int32)

    def _pack_resident(self, packed: np.ndarray) -> None:
        packed[:, NUM_STEP : NUM_STEP + NUM_RESIDENT] = self._resident[packed[:, 0]]

    def _pack_tokens(
        self, packed: np.ndarray, rows: SequenceOf[PlanRow], layout: BatchLayout
    ) -> None:
        offset = NUM_STEP + NUM_RESIDENT
        for index, row in enumerate(rows):
            packed[index, offset : offset + row.num_new] = row.token_ids
            if layout.prompt_logprobs is not None:
                targets = row.sequence.prompt_token_ids[row.start + 1 : row.start + row.num_new + 1]
                begin = offset + layout.num_new
                packed[index, begin : begin + len(targets)] = targets

    def _pack_biases(
        self, packed: np.ndarray, rows: SequenceOf[PlanRow], layout: BatchLayout
    ) -> None:
        width = layout.flags.bias_width
        offset = layout.table_offset - 2 * width
        for index, row in enumerate(rows):
            if not row.samples:
                continue
            ids, values = biases_of(row.sequence)
            packed[index, offset : offset + len(ids)] = ids
            packed[index, offset + width : offset + width + len(ids)] = values.view(np.int32)


def beam_rows(rows: SequenceOf[PlanRow]) -> dict[Request, range]:
    """The rows of each beam search that chooses in this dispatch: they stand together, by rank."""
    found: dict[Request, range] = {}
    for index, row in enumerate(rows):
        request = row.sequence.request
        if row.samples and request.is_search:
            first = found[request].start if request in found else index
            found[request] = range(first, index + 1)
    return found


def pack_beams(packed: np.ndarray, rows: SequenceOf[PlanRow]) -> None:
    """Fill the beams' columns; scores count from the best beam's, so that float32 is enough."""
    packed[:, 0] = NO_GROUP
    for group, members in enumerate(beam_rows(rows).values()):
        scores = [rows[index].sequence.cumulative_logprob for index in members]
        relative = np.array(scores, np.float64) - scores[0]
        packed[members.start : members.stop, 0] = group
        packed[members.start : members.stop, 1] = relative.astype(np.float32).view(np.int32)


def banned_ids(sequence: Sequence) -> tuple[int, ...]:
    """The tokens that may not be sampled next: every end token, before ``min_tokens``."""
    request = sequence.request
    next_position = sequence.num_output + sequence.num_pending - 1
    if next_position >= request.params.min_tokens:
        return ()
    return tuple(request.stop_ids.union(request.eos_token_ids))


def biases_of(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """The tokens whose logits the next step changes.

    Returns:
      Token ids (int32) and what is added to their logits (float32; -inf bans).
    """
    banned = banned_ids(sequence)
    pairs = [*sequence.request.params.bias_pairs, *((token, -np.inf) for token in banned)]
    ids = np.array([token for token, _ in pairs], np.int32)
    return ids, np.array([value for _, value in pairs], np.float32)


def row_buckets(max_rows: int, *, second: int) -> tuple[int, ...]:
    """Row counts that batches are padded to: 1, ``second``, then doubling, up to ``max_rows``.

    >>> row_buckets(32, second=8)
    (1, 8, 16, 32)
    >>> row_buckets(16, second=2)
    (1, 2, 4, 8, 16)
    """
    buckets, size = [1], second
    while size < max_rows:
        buckets.append(size)
        size *= 2
    if max_rows > 1:
        buckets.append(max_rows)
    return tuple(buckets)


def padded_rows(num_rows: int, buckets: SequenceOf[int]) -> int:
    """The smallest bucket that holds ``num_rows``."""
    return next(bucket for bucket in buckets if bucket >= num_rows)
