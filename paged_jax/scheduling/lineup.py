"""Who runs, who waits, and in which order: the queues of groups and the state slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.integrity import Queues, check_queues
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


class Lineup:
    """The queues of sequence groups, all in arrival order, and the state slots of those that run.

    Everyone preempted is later than everyone running, and everyone waiting is later still.

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
        self.running: OrderedDict[SequenceGroup, None] = OrderedDict()
        self.preempted: OrderedDict[SequenceGroup, None] = OrderedDict()
        self.waiting: OrderedDict[SequenceGroup, None] = OrderedDict()
        self.live: dict[Hashable, SequenceGroup] = {}
        self.free_slots = list(range(num_slots))[::-1]
        self.worst_case_blocks = 0
        self._num_slots = num_slots

    @property
    def next(self) -> SequenceGroup | None:
        """The group that starts next: while anyone is preempted, nobody new."""
        line = self.preempted or self.waiting
        return next(iter(line)) if line else None

    @property
    def latest(self) -> SequenceGroup:
        """The running group that is preempted first."""
        return next(reversed(self.running))

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        """The group of a live sequence."""
        return self.live[sequence.request.request_id]

    def add(self, group: SequenceGroup) -> None:
        """Put a new group at the end of the line."""
        self.live[group.request.request_id] = group
        self.waiting[group] = None

    def start(self, group: SequenceGroup, *, worst_case_blocks: int) -> None:
        """Let ``next`` run: its live sequences get state slots."""
        del (self.preempted or self.waiting)[group]
        group.worst_case_blocks = worst_case_blocks
        self.worst_case_blocks += worst_case_blocks
        self.running[group] = None
        for sequence in group.live:
            sequence.state_slot = self.free_slots.pop()
            sequence.status = SequenceStatus.RUNNING

    def put_back(self, group: SequenceGroup) -> None:
        """Move a running group to the front of the preempted ones: its state slots are free."""
        del self.running[group]
        self.worst_case_blocks -= group.worst_case_blocks
        for sequence in group.live:
            self._take_slot(sequence)
            sequence.status = SequenceStatus.PREEMPTED
        self.preempted[group] = None
        self.preempted.move_to_end(group, last=False)

    def end(self, sequence: Sequence) -> None:
        """Take a live sequence out; with the last one of its group, the group too."""
        group, status = self.group_of(sequence), sequence.status
        group.live.remove(sequence)
        is_running = status is SequenceStatus.RUNNING
        if is_running:
            self._take_slot(sequence)
        sequence.status = SequenceStatus.FINISHED
        if group.live:
            return
        if is_running:
            del self.running[group]
            self.worst_case_blocks -= group.worst_case_blocks
        else:
            del (self.preempted if status is SequenceStatus.PREEMPTED else self.waiting)[group]
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

    def _take_slot(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.state_slot)
        sequence.state_slot = -1
