"""How long the stages of a layer take one after the other, and what overlapping can make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tierstore.pipeline import STAGES, schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.timeline import Timeline

ATTENTION = STAGES[:4]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage in the mean layer of the mean step, for the whole batch.

    micro_batches: how many the bound is for.
    """

    seconds: Mapping[str, float]
    micro_batches: int

    @classmethod
    def of(cls, timeline: Timeline, micro_batches: int) -> Self:
        """Those that were noted."""
        layers = {(span.facts.get("step"), span.facts.get("layer")) for span in timeline.spans}
        turns = len([turn for turn in layers if None not in turn])
        total = {
            stage.name: sum(s.end - s.start for s in timeline.spans if s.name == stage.name)
            for stage in ATTENTION
        }
        return cls({name: seconds / turns for name, seconds in total.items()}, micro_batches)

    @property
    def sequential(self) -> float:
        """Seconds of a layer, one stage after the other."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> float:
        """Seconds of a layer under the schedule sfc, if stages did not slow each other down."""
        each = {
            stage.name: self.seconds[stage.name] / (1 if stage.is_whole else self.micro_batches)
            for stage in ATTENTION
        }
        return simulate(schedule("sfc", 1, self.micro_batches, ATTENTION), each).seconds

    @property
    def hideable(self) -> float:
        """Share of the layer that is selecting and judging."""
        return (self.seconds["select"] + self.seconds["judge"]) / self.sequential

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in self.seconds.items())
        return (
            f"A layer, one stage after the other: {listed}; select and judge are "
            f"{self.hideable:.0%} of it. Overlapped in {self.micro_batches} micro-batches it takes "
            f"{1e3 * self.bound:.2f} ms at best, which is {self.sequential / self.bound:.2f} times "
            "as fast."
        )
