"""Runs plans on the device: owns the pool and the row state, and nothing that the host decides."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np

from paged_jax.batch import BatchLayout, BatchPacker, beam_rows, padded_rows, row_buckets
from paged_jax.block_fill import ID_BUCKETS, make_block_fill, padded_ids
from paged_jax.blocks.block_moves import FreedBlocks
from paged_jax.config import EngineConfig, ModelSpec
from paged_jax.host_pool import HostPool
from paged_jax.model import Model
from paged_jax.pool import KVPool
from paged_jax.row_state import create, load_counts, with_penalties, without_penalties
from paged_jax.sampling.beam import candidate_bucket
from paged_jax.sampling.inputs import LOGPROB_WIDTHS, SamplerFlags, next_width, sampler_flags
from paged_jax.scheduling.beam import most_candidates
from paged_jax.scheduling.plan import Plan, PlanRow
from paged_jax.scheduling.sequence import Sequence
from paged_jax.step import make_block_copy, make_step
from paged_jax.step_result import Dispatch, StepHandle, prompt_logprobs_of
from pallas_kernels.backends import GPU_BACKENDS
from pallas_kernels.block_copy import check_copies
from pallas_kernels.devices import current_device

# Rows with prompt logprobs keep [B, T, V] logits for a moment; few rows keep that small.
PROMPT_LOGPROB_ROWS = 4
COPY_BUCKET = 64
FEW_BRANCHES = 8


class JaxExecutor:
    """Executes plans with a jitted step; pool and row state are donated from step to step.

    Args:
      model: the model.
      config: engine settings.
      num_blocks: blocks of the pool, the null block included.
      num_host_blocks: blocks of the host pool; 0: none.
      max_model_len: longest context in tokens.
      table_of: the block manager's table of a sequence id, as int32.
      seed_of: the 64-bit seed of a sequence.

    Raises:
      NotImplementedError: ``attention_backend`` names a GPU backend, without a GPU or interpreter.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        max_model_len: int,
        table_of: Callable[[int], np.ndarray],
        seed_of: Callable[[Sequence], int],
    ) -> None:
        _check_backend(config)
        self._params = model.params
        self._vocab_size = model.spec.vocab_size
        self._config = config
        self._max_model_len = max_model_len
        self._table_width = -(-max_model_len // config.block_size)
        max_rows = -(-config.max_num_batched_tokens // config.prefill_row_len)
        # A decode row costs little beside the weights that every step reads; a prefill row costs
        # its positions. So the first are padded generously, the second closely.
        self._decode_buckets = row_buckets(config.max_num_seqs, second=8)
        self._prefill_buckets = row_buckets(max_rows, second=2)
        # So does a row that verifies drafts.
        self._verify_buckets = row_buckets(config.max_num_seqs, second=2)
        # A branch row costs one sampled token, so two sizes are enough: few, and all there can be.
        most = config.max_num_seqs - 1
        self._branch_buckets = tuple(sorted({min(FEW_BRANCHES, most), most}))
        self._packer = BatchPacker(
            num_slots=config.max_num_seqs,
            table_width=self._table_width,
            table_of=table_of,
            seed_of=seed_of,
        )
        self.pool = self._make_pool(model.spec, config, num_blocks=num_blocks)
        self.state = jax.jit(create, static_argnums=0)(config.max_num_seqs)
        choices = {
            "backend": config.attention_backend,
            "interpret": config.kernel_interpreter,
            "donate": config.donate,
        }
        facts = {"num_heads": model.spec.num_heads, "max_window": model.spec.window}
        self._step = make_step(model.apply, **facts, **choices)
        self._copy = make_block_copy(**choices)
        self._fill = make_block_fill(donate=config.donate)
        self.host_pool = (
            HostPool(self.pool, num_blocks=num_host_blocks, **choices) if num_host_blocks else None
        )
        self._load_counts = jax.jit(
            load_counts, donate_argnames=("state",) if config.donate else ()
        )
        self._with_penalties = jax.jit(
            functools.partial(with_penalties, vocab_size=model.spec.vocab_size)
        )

    @staticmethod
    def _make_pool(spec: ModelSpec, config: EngineConfig, *, num_blocks: int) -> KVPool:
        return KVPool.create(
            spec,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=config.kv_dtype,
            head_dim=config.pool_head_dim,
        )

    @property
    def max_plain_programs(self) -> int:
        """Most programs that greedy requests compile, for any lengths and any number of them.

        One a batch shape, the pool, the row state and the block copy, with a host pool two for each
        of its buffer sizes, and with ``zero_on_free`` one for each of ``ID_BUCKETS``. Each further
        combination of sampling features that is in use at once (``SamplerFlags``: chance,
        penalties, three bias widths, four log-probability widths) adds at most one a batch shape;
        penalties add two more and prompt log-probabilities one a width. Requests for several
        completions (n > 1) add at most two a prefill shape, for the steps in which their prompts
        end. Beam searches add one a batch shape and ``candidate_bucket`` in use, whatever their
        number and widths. Speculation has one T, 1 + ``num_draft_tokens``, so it adds one batch
        shape a bucket of verification rows.
        """
        num_shapes = len(self._decode_buckets) + len(self._prefill_buckets)
        if self._config.speculation is not None:
            num_shapes += len(self._verify_buckets)
        num_moves = 1 if self.host_pool is None else 1 + self.host_pool.max_programs
        num_moves += len(ID_BUCKETS) if self._config.zero_on_free else 0
        return num_shapes + 2 + num_moves

    def set_params(self, params: Any) -> None:
        """Run on other weights of the same shapes from the next step on."""
        self._params = params

    def execute(self, plan: Plan) -> StepHandle:
        """Dispatch a plan and return at once: swaps, copies, prompts, decode, then drafts."""
        handle = StepHandle(plan.sampling_rows, [], self._config.check_logits)
        if self.host_pool is not None and (plan.swap_outs or plan.swap_ins):
            self.host_pool.store(self.pool, plan.swap_outs)
            self.pool = self.host_pool.load(self.pool, plan.swap_ins)
            handle.settle = self.host_pool.settle
        self._run_copies(plan.copies)
        self._load_penalties(plan)
        flags = _flags_of({row.sequence for row in plan.rows})
        plain = [row for row in plan.prefill_rows if prompt_logprobs_of(row) is None]
        scored = [row for row in plan.prefill_rows if prompt_logprobs_of(row) is not None]
        for kind, most in ((plain, self._prefill_buckets[-1]), (scored, PROMPT_LOGPROB_ROWS)):
            for start in range(0, len(kind), most):
                rows = kind[start : start + most]
                self._dispatch(rows, handle, flags, branches=_branches_of(rows, plan))
        if plan.decode_rows:
            self._dispatch(plan.decode_rows, handle, flags, is_decode=True)
        if plan.verify_rows:
            self._dispatch(plan.verify_rows, handle, flags, verifies=True)
        return handle

    def zero(self, blocks: FreedBlocks) -> None:
        """Overwrite blocks with zeros, before whatever is dispatched next."""
        for ids in padded_ids(blocks.device):
            self.pool = self._fill(self.pool, ids)
        if self.host_pool is not None and blocks.host:
            self.host_pool.zero(blocks.host)

    def _dispatch(
        self,
        rows: SequenceOf[PlanRow],
        handle: StepHandle,
        flags: SamplerFlags,
        *,
        is_decode: bool = False,
        verifies: bool = False,
        branches: SequenceOf[PlanRow] = (),
    ) -> None:
        start = time.perf_counter()
        if verifies:
            layout = self._verify_layout(rows, flags)
        else:
            layout = self._layout(rows, flags, is_decode, num_branches=len(branches))
        packed = self._packer.pack(rows, layout, branches=branches)
        handle.pack_seconds += time.perf_counter() - start
        self.pool, self.state, outputs = self._step(
            self._params, self.pool, self.state, packed, layout=layout
        )
        padded = layout.num_rows, layout.num_branches
        num_each = layout.num_new if verifies else 1
        handle.dispatches.append(Dispatch(list(rows), list(branches), *padded, outputs, num_each))
        handle.num_positions += layout.num_rows * layout.num_new
        handle.num_real_positions += sum(row.num_new for row in rows)

    def _layout(
        self,
        rows: SequenceOf[PlanRow],
        flags: SamplerFlags,
        is_decode: bool,
        *,
        num_branches: int,
    ) -> BatchLayout:
        prompt_logprobs = None if is_decode else prompt_logprobs_of(rows[0])
        buckets = self._decode_buckets if is_decode else self._prefill_buckets
        num_rows = padded_rows(len(rows), buckets)
        if prompt_logprobs is not None:
            # One top-N for all scored rows of the dispatch, so that N makes few programs.
            wanted = max(prompt_logprobs_of(row) or 0 for row in rows)
            prompt_logprobs = next_width("prompt_logprobs", wanted, LOGPROB_WIDTHS)
            num_rows = PROMPT_LOGPROB_ROWS
        return BatchLayout(
            num_rows=num_rows,
            num_new=1 if is_decode else self._config.prefill_row_len,
            table_width=self._table_width,
            vocab_size=self._vocab_size,
            is_decode=is_decode,
            flags=flags,
            prompt_logprobs=prompt_logprobs,
            num_branches=padded_rows(num_branches, self._branch_buckets) if num_branches else 0,
            num_candidates=self._num_candidates(rows),
        )

    def _verify_layout(self, rows: SequenceOf[PlanRow], flags: SamplerFlags) -> BatchLayout:
        assert self._config.speculation is not None
        return BatchLayout(
            num_rows=padded_rows(len(rows), self._verify_buckets),
            num_new=1 + self._config.speculation.num_draft_tokens,
            table_width=self._table_width,
            vocab_size=self._vocab_size,
            is_decode=False,
            flags=flags,
            verifies=True,
        )

    def _num_candidates(self, rows: SequenceOf[PlanRow]) -> int:
        """Continuations to keep of each row that is a beam, padded; 0 where none is."""
        wanted = [most_candidates(request) for request in beam_rows(rows)]
        if not wanted:
            return 0
        return candidate_bucket(max(wanted), vocab_size=self._vocab_size)

    def _run_copies(self, copies: SequenceOf[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        check_copies(sources, targets, num_blocks=self.pool.num_blocks)
        for start in range(0, len(copies), COPY_BUCKET):
            pairs = np.zeros((2, COPY_BUCKET), np.int32)
            chunk = np.array(copies[start : start + COPY_BUCKET], np.int32).T
            pairs[:, : chunk.shape[1]] = chunk
            self.pool = self._copy(self.pool, pairs)

    def _load_penalties(self, plan: Plan) -> None:
        """Keep token counts exactly while some request of the plan uses penalties."""
        rows = plan.rows
        if not rows:  # a step that only swaps: whoever decodes next still needs its counts
            return
        if not any(row.sequence.request.params.needs_penalties for row in rows):
            self.state = without_penalties(self.state)
            return
        if self.state.output_counts is None:
            self.state = self._with_penalties(self.state)
        new = [row for row in plan.decode_rows if row.from_host]
        for row in plan.prefill_rows + plan.branch_rows + new:
            sequence = row.sequence
            if not (row.samples and sequence.request.params.needs_penalties):
                continue
            known = row.start + row.num_new
            tokens = np.zeros(self._max_model_len, np.int32)
            tokens[:known] = sequence.token_slice(0, known)
            counts = (sequence.state_slot, len(sequence.prompt_token_ids), known)
            slot, prompt_len, total_len = (np.int32(value) for value in counts)
            self.state = self._load_counts(self.state, slot, tokens, prompt_len, total_len)


def _check_backend(config: EngineConfig) -> None:
    """Refuse at once what could only fail in the first step."""
    name, device = config.attention_backend, current_device()
    if name in GPU_BACKENDS and not (device.is_cuda or config.kernel_interpreter):
        raise NotImplementedError(
            f"EngineConfig.attention_backend={name!r} needs an NVIDIA GPU, and the default device "
            f"is {device.platform}; kernel_interpreter=True runs it here, slowly (for tests)"
        )


def _flags_of(sequences: Collection[Sequence]) -> SamplerFlags:
    """The least code that serves every sequence of a plan.

    One choice a plan, whichever of its rows sample now, so that programs are few: they change only
    when a request of a new kind comes or the last one of a kind goes.
    """
    params = [sequence.request.params for sequence in sequences]
    banned = [
        tuple(sequence.request.stop_ids | sequence.request.eos_token_ids)
        if sequence.request.params.min_tokens
        else ()
        for sequence in sequences
    ]
    return sampler_flags(params, banned=banned)


def _branches_of(rows: SequenceOf[PlanRow], plan: Plan) -> list[PlanRow]:
    """The plan's branch rows that sample from the logits of one of these."""
    if not plan.branch_rows:
        return []
    requests = {row.sequence.request for row in rows if row.samples}
    return [row for row in plan.branch_rows if row.sequence.request in requests]
