"""Sequences of a running batch: which there are, and in which lane of the batch each is.

Sequences keep their number for as long as they run; lanes are used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierstore.adapters.attention.lanes import Admitted


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence in its lane."""

    lane: int
    admitted: Admitted


class Sequences:
    """The sequences that an engine holds, in the order in which they came.

    Attributes
    ----------
    failures: the error that ended each sequence that is at an end and still held.
    """

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}
        self._running: dict[int, Running] = {}
        self._next = 0

    @property
    def numbers(self) -> list[int]:
        """All that are held."""
        return list(self._running)

    @property
    def whole(self) -> list[int]:
        """Those that are not at an end."""
        return [each for each in self._running if each not in self.failures]

    def admitted(self) -> list[Admitted]:
        """What each sequence was let in for, by lanes; Requires: no lane is free."""
        by_lane = sorted(self._running.values(), key=lambda each: each.lane)
        return [each.admitted for each in by_lane]

    def free_lane(self) -> int:
        """The first lane that no sequence has; it may have to be made."""
        taken = {each.lane for each in self._running.values()}
        return next(lane for lane in range(len(taken) + 1) if lane not in taken)

    def enter(self, lane: int, admitted: Admitted) -> int:
        """The number of a new sequence in a lane."""
        sequence = self._next
        self._next += 1
        self._running[sequence] = Running(lane, admitted)
        return sequence

    def leave(self, sequence: int) -> int:
        """Forget a sequence; returns its lane."""
        self.failures.pop(sequence, None)
        return self._running.pop(sequence).lane

    def renumbered(self, sequences: Iterable[int]) -> Sequences:
        """These, any of them several times, numbered from 0, in lanes of the same numbers."""
        others = Sequences()
        for lane, each in enumerate(sequences):
            others.enter(lane, self._running[each].admitted)
        return others

    def lane(self, sequence: int) -> int:
        """The lane of a sequence; ConfigError if it is not here."""
        if sequence not in self._running:
            raise ConfigError(
                f"sequence {sequence}: expected one of {self.numbers}, those that were added and "
                "not finished"
            )
        return self._running[sequence].lane

    def lanes(self, sequences: Sequence[int]) -> list[int]:
        """Lanes of distinct sequences; ConfigError if one is not here or at an end."""
        if len(set(sequences)) != len(sequences):
            raise ConfigError(f"sequences={list(sequences)}: expected each of them once")
        for each in sequences:
            if each in self.failures:
                raise ConfigError(
                    f"sequence {each} is at an end ({self.failures[each]}): finish() it"
                )
        return [self.lane(each) for each in sequences]
