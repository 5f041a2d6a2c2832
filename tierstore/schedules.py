"""Schedules: the order of the stages of decoding, layer by layer and micro-batch by micro-batch.

A schedule is a list of tasks. Each has a resource, which does its tasks in the order of the list,
and begins when those named in `after` are done. `tierstore.pipeline` runs such a list, where those
resources that wait for a device do every second micro-batch in order, or predicts how long it
takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.sizes import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Stage(NamedTuple):
    """One kind of work of a layer.

    resource: what does it. is_whole: whether it is done once for the batch instead of once for each
    micro-batch. Of those, the first is the computation that needs all before it.
    """

    name: str
    resource: str
    is_whole: bool = False


CALLER = "device"
"""The resource that is the calling thread: it selects and computes."""

WAITING = ("disk", "link")
"""Resources whose tasks mostly wait for a device, and leave the processors to others.

A run has two of their tasks under way at once; a simulation one, as both share the device."""

STAGES = (
    Stage("select", CALLER),
    Stage("judge", "cpu"),
    Stage("fetch", "disk"),
    Stage("compute", CALLER, is_whole=True),
    Stage("rest", CALLER, is_whole=True),
    Stage("update", "cpu", is_whole=True),
)
"""Of a layer: attention in four stages; the projections and the MLP that follow it; and what must
be known before the layer's next step, which may run beside the rest."""


class Task(NamedTuple):
    """A stage of one micro-batch for one layer and step; micro-batch -1 stands for all.

    after: positions in the schedule, all before its own.
    """

    stage: str
    resource: str
    step: int
    layer: int
    micro_batch: int
    after: tuple[int, ...]


Schedule = list[Task]


def schedule(
    name: str,
    layers: int,
    micro_batches: int,
    stages: Sequence[Stage] = STAGES,
    *,
    steps: int = 1,
    ahead: int = 2,
) -> Schedule:
    """The tasks of some decoding steps.

    Parameters
    ----------
    name: ``"sequential"``: one stage after the other, as Quest and ShadowKV do. ``"sfc"``: select,
        fetch and compute decoupled (KVDrive): while a micro-batch is selected, the one before it is
        judged and the one before that fetched. ``"previous-layer"``: each layer's blocks are
        guessed and fetched while the layer before computes (InfiniGen). ``"previous-step"``: each
        layer computes with what its query of the step before selected, and fetches meanwhile for
        the next one (FreeKV).
    stages: in order; those of micro-batches first.
    ahead: micro-batches that a stage may have begun and the next one not ended; a bounded queue.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}")
    for what, count in (
        ("layers", layers), ("micro_batches", micro_batches), ("steps", steps), ("ahead", ahead)
    ):  # fmt: skip
        check_whole(what, count, 1, MOST)
    kinds = [stage.is_whole for stage in stages]
    if kinds != sorted(kinds) or len(set(kinds)) != 2:
        raise ConfigError(
            f"stages={[stage.name for stage in stages]}: expected stages of micro-batches, then "
            "stages of the whole batch"
        )
    draft = _Draft(layers, micro_batches, stages, steps, ahead)
    SCHEDULES[name](draft)
    return draft.tasks


class _Draft:
    """A schedule in the making. Positions of tasks are what its methods take and give."""

    def __init__(
        self, layers: int, micro_batches: int, stages: Sequence[Stage], steps: int, ahead: int
    ) -> None:
        self.layers = layers
        self.parts = range(micro_batches)
        self.steps = steps
        self.front = [stage for stage in stages if not stage.is_whole]
        self.compute, *self.others = [stage for stage in stages if stage.is_whole]
        self.tasks: Schedule = []
        self._ahead = ahead

    @property
    def passes(self) -> list[tuple[int, int]]:
        """Step and layer of each layer's turn."""
        return [(step, layer) for step in range(self.steps) for layer in range(self.layers)]

    def add(self, stage: Stage, at: tuple[int, int], part: int, after: Sequence[int]) -> int:
        """Position of a new task."""
        position = len(self.tasks)
        self.tasks.append(
            Task(stage.name, stage.resource, *at, part, tuple(sorted({*after} - {-1})))
        )
        return position

    def fetches(self, at: tuple[int, int], after: Sequence[int]) -> list[int]:
        """All stages before the computation, overlapped; gives the last task of each part."""
        last, stages = len(self.front) - 1, len(self.front)
        tasks: dict[tuple[int, int], int] = {}
        for wave in range(len(self.parts) + last):
            # Later stages first: where two share a resource, it finishes what it began.
            for number in reversed(range(stages)):
                part = wave - number
                if part not in self.parts:
                    continue
                needs = [*after] if number == 0 else [tasks[number - 1, part]]
                if number < last:
                    needs.append(tasks.get((number + 1, part - self._ahead), -1))
                tasks[number, part] = self.add(self.front[number], at, part, needs)
        return [tasks[last, part] for part in self.parts]

    def whole(self, at: tuple[int, int], after: Sequence[int]) -> list[int]:
        """The computation and, after it, the other stages of the whole batch; gives all."""
        done = self.add(self.compute, at, -1, after)
        return [done, *(self.add(stage, at, -1, [done]) for stage in self.others)]


def _sequential(draft: _Draft) -> None:
    before = -1
    for at in draft.passes:
        for part in draft.parts:
            for stage in draft.front:
                before = draft.add(stage, at, part, [before])
        for stage in (draft.compute, *draft.others):
            before = draft.add(stage, at, -1, [before])


def _sfc(draft: _Draft) -> None:
    before: list[int] = []
    for at in draft.passes:
        before = draft.whole(at, draft.fetches(at, before))


def _previous_layer(draft: _Draft) -> None:
    before: list[int] = []
    for step in range(draft.steps):
        ready = draft.fetches((step, 0), before)
        for layer in range(draft.layers):
            own, ready = ready, []
            if layer + 1 < draft.layers:
                ready = draft.fetches((step, layer + 1), before)
            before = draft.whole((step, layer), [*own, *before])


def _previous_step(draft: _Draft) -> None:
    before: list[int] = []
    guessed: dict[int, list[int]] = {}
    for at in draft.passes:
        own = guessed.get(at[1]) or draft.fetches(at, before)
        done = draft.add(draft.compute, at, -1, [*own, *before])
        if at[0] + 1 < draft.steps:
            guessed[at[1]] = draft.fetches((at[0] + 1, at[1]), [done])
        before = [done, *(draft.add(stage, at, -1, [done]) for stage in draft.others)]


SCHEDULES: dict[str, Callable[[_Draft], None]] = {
    "sequential": _sequential,
    "previous-layer": _previous_layer,
    "previous-step": _previous_step,
    "sfc": _sfc,
}
"""Known schedules; the first is what the others are compared with."""
