"""How long a layer's stages take together: the schedules of the pipeline, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore import pipeline
from tierstore.pipeline import CALLER, schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence


_FEW, _MANY = 4, 8
"""Layers of two steps, whose difference has neither beginning nor end in it."""


class Stage(NamedTuple):
    """One stage of a micro-batch: what it occupies, and for how many seconds."""

    resource: str
    seconds: float


def layer_seconds(name: str, ahead: Sequence[Stage], after: float, micro_batches: int) -> float:
    """Seconds of one layer in the middle of a step.

    Parameters
    ----------
    name: of a schedule; see `tierstore.pipeline.schedule`.
    ahead: select, judge and fetch of one micro-batch.
    after: seconds of attention and of the rest of the layer, for the whole batch at once.
    """
    stages = [pipeline.Stage(str(at), stage.resource) for at, stage in enumerate(ahead)]
    stages.append(pipeline.Stage("after", CALLER, is_whole=True))
    durations = {str(at): stage.seconds for at, stage in enumerate(ahead)} | {"after": after}
    few, many = (
        simulate(schedule(name, layers, micro_batches, stages, ahead=micro_batches), durations)
        for layers in (_FEW, _MANY)
    )
    return (many.seconds - few.seconds) / (_MANY - _FEW)
