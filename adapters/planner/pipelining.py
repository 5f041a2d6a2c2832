"""How long a layer's stages take together: discrete events over micro-batches."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEDULES = ("sequential", "previous-layer", "sfc")


class Stage(NamedTuple):
    """One stage of a micro-batch: what it occupies, and for how many seconds."""

    resource: str
    seconds: float


def makespan(micro_batches: Sequence[Sequence[Stage]]) -> float:
    """Seconds until every micro-batch has gone through its stages, in order.

    A resource does one stage at a time, those that are ready first, the earlier micro-batch of
    two.
    """
    free: dict[str, float] = {}
    events = [(0.0, number, 0) for number in range(len(micro_batches))]
    end = 0.0
    while events:
        ready, number, position = heapq.heappop(events)
        if position == len(micro_batches[number]):
            end = max(end, ready)
            continue
        resource, seconds = micro_batches[number][position]
        start = free.get(resource, 0.0)
        if start > ready:
            heapq.heappush(events, (start, number, position))
            continue
        free[resource] = ready + seconds
        heapq.heappush(events, (ready + seconds, number, position + 1))
    return end


def layer_seconds(schedule: str, ahead: Sequence[Stage], after: float, micro_batches: int) -> float:
    """Seconds of one layer.

    Parameters
    ----------
    schedule: "sequential": all one after the other. "previous-layer": what precedes attention runs
        while the layer before computes. "sfc": `ahead` overlaps between micro-batches.
    ahead: select, judge and fetch of one micro-batch.
    after: seconds of attention and of the rest of the layer, for the whole batch at once.
    """
    before = sum(stage.seconds for stage in ahead) * micro_batches
    if schedule == "previous-layer":
        return max(before, after)
    if schedule == "sfc":
        return makespan([ahead] * micro_batches) + after
    return before + after
