"""A line of sequence groups in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from paged_jax.scheduling.group import SequenceGroup


def rank(group: SequenceGroup) -> tuple[int, int]:
    """What the order goes by: priority (lower first), then arrival. No two live groups tie."""
    request = group.request
    return request.priority, request.arrival


class Line:
    """Groups sorted by ``rank``; whoever comes in takes the place that is due to it."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    @property
    def first(self) -> SequenceGroup | None:
        """The group that is served first, or None."""
        return self._groups[0] if self._groups else None

    @property
    def last(self) -> SequenceGroup:
        """The group that is served last; the line must not be empty."""
        return self._groups[-1]

    def add(self, group: SequenceGroup) -> None:
        """Put a group in its place."""
        insort(self._groups, group, key=rank)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it stands."""
        place = bisect_left(self._groups, rank(group), key=rank)
        assert self._groups[place] is group, f"{group} must be in the line"
        del self._groups[place]

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)
