"""Who runs, who waits, and in which order: the queues of groups and the state slots."""

from __future__ import annotations

from collections.abc import Hashable

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.integrity import Queues, check_queues
from paged_jax.scheduling.line import Line, rank
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


class Lineup:
    """The queues of sequence groups, each in order of rank, and the state slots of those that run.

    Everyone preempted ranks after everyone running. Of one priority, everyone waiting ranks later
    still.

    Args:
      num_slots: most running sequences; their state slots are ``0 .. num_slots - 1``.

    Attributes:
      running: groups that hold blocks.
      preempted: groups that lost their blocks and wait to resume.
      waiting: groups that have not started yet.
      live: all of them, by request id.
      free_slots: state slots that nobody has.
      worst_case_blocks: most blocks that the running groups can come to hold.
    """

    __slots__ = (
        "_num_slots",
        "free_slots",
        "live",
        "preempted",
        "running",
        "waiting",
        "worst_case_blocks",
    )

    def __init__(self, num_slots: int) -> None:
        self.running = Line()
        self.preempted = Line()
        self.waiting = Line()
        self.live: dict[Hashable, SequenceGroup] = {}
        self.free_slots = list(range(num_slots))[::-1]
        self.worst_case_blocks = 0
        self._num_slots = num_slots

    @property
    def next(self) -> SequenceGroup | None:
        """The group that starts or resumes next; while it cannot, nobody does.

        So while anyone is preempted, nobody starts who ranks after it: new ones of its priority all
        do, and only a more urgent one passes.
        """
        heads = [line.first for line in (self.preempted, self.waiting) if line.first is not None]
        return min(heads, key=rank, default=None)

    @property
    def num_running(self) -> int:
        """Sequences that have a state slot."""
        return self._num_slots - len(self.free_slots)

    @property
    def latest(self) -> SequenceGroup:
        """The running group that is preempted first."""
        return self.running.last

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        """The group of a live sequence."""
        return self.live[sequence.request.request_id]

    def add(self, group: SequenceGroup) -> None:
        """Put a new group in the line."""
        self.live[group.request.request_id] = group
        self.waiting.add(group)

    def start(self, group: SequenceGroup, *, worst_case_blocks: int) -> None:
        """Let ``next`` run: its live sequences get state slots."""
        self._line_of(group).remove(group)
        group.worst_case_blocks = worst_case_blocks
        self.worst_case_blocks += worst_case_blocks
        self.running.add(group)
        for sequence in group.live:
            sequence.state_slot = self.free_slots.pop()
            sequence.status = SequenceStatus.RUNNING

    def put_back(self, group: SequenceGroup) -> None:
        """Move a running group to the preempted ones: its state slots are free."""
        self.running.remove(group)
        self.worst_case_blocks -= group.worst_case_blocks
        for sequence in group.live:
            self._take_slot(sequence)
            sequence.status = SequenceStatus.PREEMPTED
        self.preempted.add(group)

    def end(self, sequence: Sequence) -> None:
        """Take a live sequence out; with the last one of its group, the group too."""
        group = self.group_of(sequence)
        line = self._line_of(group)
        group.live.remove(sequence)
        if line is self.running:
            self._take_slot(sequence)
        sequence.status = SequenceStatus.FINISHED
        if group.live:
            return
        line.remove(group)
        if line is self.running:
            self.worst_case_blocks -= group.worst_case_blocks
        del self.live[sequence.request.request_id]

    def check_integrity(self, manager: BlockManager) -> None:
        """Prove that queues, state slots, tables and counters agree.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        queues = Queues(
            running=self.running,
            preempted=self.preempted,
            waiting=self.waiting,
            live=self.live.values(),
            free_slots=self.free_slots,
            num_slots=self._num_slots,
            worst_case_blocks=self.worst_case_blocks,
        )
        check_queues(queues, manager)

    def _line_of(self, group: SequenceGroup) -> Line:
        lines = {
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.PREEMPTED: self.preempted,
            SequenceStatus.WAITING: self.waiting,
        }
        return lines[group.live[0].status]

    def _take_slot(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.state_slot)
        sequence.state_slot = -1
