"""The order in which the stages of a layer's step follow each other, as its schedule has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.adapters.attention.selection import of_rows
from tierstore.adapters.attention.step import LayerStep
from tierstore.adapters.attention.whole_layers import bring_layer
from tierstore.pipeline import STAGES, Pipeline, Task, perform, schedule
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierstore.adapters.attention.attending import Attending
    from tierstore.adapters.attention.layer import Layer
    from tierstore.adapters.attention.places import Places
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Ids, Index
    from tierstore.kernels.element import Array
    from tierstore.memory import Memory
    from tierstore.pipeline import Run, Schedule
    from tierstore.store import BlockStore
    from tierstore.timeline import Timeline

_ATTENTION = STAGES[:4]
_QUARTERS = 4
"""Micro-batches that a batch is cut into by default on a GPU: as many as can be in a stage each. On
a CPU all stages want the same cores, and each micro-batch costs calls."""


class Question(NamedTuple):
    """What a step asks of a layer.

    Attributes
    ----------
    number: of the layer.
    query, budgets: [R, G, d] elements; int32 [layers, R] blocks of all layers.
    most_residents: blocks that a row has in the top tier at most, if it attends to all of them.
    next_query: a guess of what the next layer asks, [R, G, d], for a schedule that wants it.
    """

    number: int
    query: Array
    budgets: Ids
    most_residents: int
    next_query: Array | None = None


class Stages:
    """Steps with the true query: one stage after the other, or overlapped over micro-batches.

    Between layers nothing is under way but the update of the last one; `settle` waits for it.
    """

    def __init__(
        self,
        store: BlockStore,
        rules: Rules,
        attending: Attending,
        layers: Sequence[Layer],
        memories: tuple[Memory, Memory],
    ) -> None:
        self._store, self._rules, self._attending = store, rules, attending
        self._layers = layers
        self._memories = memories
        """Of the device and of the host; one of them may be both."""
        self._timeline: Timeline | None = None
        self._pipeline = Pipeline()
        self._scratches: list[tuple[Scratch, Scratch]] = []
        self._division: list[slice] = []
        """Rows of the micro-batches that were asked for; `_rows` may be fewer."""
        self._rows: list[slice] = []
        self._parts: list[list[Index]] = []
        self._sizes: list[list[tuple[int, ...]]] = []
        self._tasks: Schedule = []
        self._updating: Run | None = None
        self.places: Places | None = None
        """Where blocks are attended that are not in the top tier; None: all are brought there."""
        self.layer_scratch: Scratch | None = None
        """Through which layers are read whole before their attention; None: they are not."""
        self._step = 0

    def watch(self, timeline: Timeline | None) -> None:
        """Note in a timeline when each stage and each transfer runs; None ends it."""
        self.settle()
        self._timeline = self._pipeline.timeline = self._store.timeline = timeline

    def close(self) -> None:
        """End the threads, when what is under way is done; its errors come no more."""
        self._pipeline.close()

    def settle(self) -> None:
        """Return when nothing is under way; raise what went wrong with it."""
        self.settle_updates()

    def settle_updates(self) -> None:
        """Return when what was updated is known; raise what went wrong with it."""
        if self._updating is not None:
            run, self._updating = self._updating, None
            run.wait()

    def end_visits(self) -> None:
        """Return when no guess has a visit any more, as what changes tiers waits for.

        What went wrong with one comes again when its layer fetches.
        """

    def drop_guesses(self) -> None:
        """Return when no guess is under way; all are forgotten, and what went wrong with them."""

    def forget(self) -> None:
        """The rows or what they hold have changed. Requires: `settle`."""
        self._division = []

    def attend(self, asked: Question, out: torch.Tensor) -> None:
        """Select, judge, fetch and compute for a layer; out [R, G, e] is filled."""
        self._divide(asked.number)
        step = self._layer_step(asked)
        tasks, calls = self._tasks_of(step.number), self._calls(step, out)
        if len(self._rows) > 1:
            # Work space may have to come out of the slots, which blocks of a live visit prevent.
            for part in self._grown_parts(step):
                step.select_part(part)
            step.take_work_space()
        try:
            if self.is_overlapped:
                self._pipeline.start(tasks, calls).wait()
            else:
                perform(tasks, calls, self._timeline)
        finally:
            step.release()

    def _calls(self, step: LayerStep, out: torch.Tensor) -> dict[str, Callable[[Task], None]]:
        def select(task: Task) -> None:
            step.select(task)
            if self.layer_scratch is not None:
                bring_layer(self._store, step.layer.segments, self.layer_scratch)
            if len(self._rows) == 1:
                step.take_work_space()
                if self.places is not None:
                    step.attend_below(self.places)

        def compute(_: Task) -> None:
            step.compute(out)

        return {"select": select, "judge": step.judge, "fetch": step.fetch, "compute": compute}

    def attend_rows(self, asked: Question, rows: slice, out: torch.Tensor) -> None:
        """`attend` for some rows alone, one stage after the other, after an error with all."""
        layer = self._layers[asked.number]
        every, alone = (
            self._step_of(asked, [of_step], [layer.index])
            for of_step in (slice(0, len(layer.segments)), rows)
        )
        every.select_part(0)
        assert every.selections[0] is not None
        alone.selections = [of_rows(every.selections[0], rows)]
        alone.take_work_space()
        calls = {
            "judge": alone.judge, "fetch": alone.fetch, "compute": lambda _: alone.compute(out)
        }  # fmt: skip
        try:
            perform(schedule("sequential", 1, 1, _ATTENTION[1:]), calls, self._timeline)
        finally:
            alone.release()

    @property
    def is_overlapped(self) -> bool:
        """Whether stages of several micro-batches run at once."""
        return len(self._rows) > 1 and self._rules.schedule == "sfc"

    def _grown_parts(self, step: LayerStep) -> list[int]:
        """Micro-batches that were never selected with so large an index, or so much."""
        index, sizes = self._layers[step.number].index, self._sizes[step.number]
        whole = index.nbytes, int(np.sum(index.kept)), index.least
        new: list[tuple[int, ...]] = [
            (*whole, int(step.budgets[rows].sum())) for rows in self._rows
        ]
        grown = [part for part, size in enumerate(new) if sizes[part] != size]
        self._sizes[step.number] = new
        return grown

    # Micro-batches

    def _divide(self, number: int) -> None:
        """Cut the batch into micro-batches, if that is not done."""
        if number:
            return
        self._step += 1
        layer = self._layers[0]
        size = self._micro_batch(layer.sequences)
        starts = range(0, layer.sequences, size)
        rows = [slice(start * layer.heads, min(start + size, layer.sequences) * layer.heads)
                for start in starts]  # fmt: skip
        if rows != self._division:
            self._division = self._rows = rows
            self._make_parts()
            self._tasks = schedule(self._rules.schedule, 1, len(self._rows), _ATTENTION)

    def _micro_batch(self, sequences: int) -> int:
        """Sequences of a micro-batch; all where nothing could overlap."""
        rules = self._rules
        takes_all = rules.on_selection is not None or self.places is not None
        if takes_all or self.layer_scratch is not None:
            return sequences
        if rules.micro_batch is not None:
            return min(rules.micro_batch, sequences)
        has_own_device = rules.geometry.device.type != "cpu"
        is_on_disk = self._store.tiers[-1].memory is None
        is_worth_it = rules.schedule != "sequential" and has_own_device and is_on_disk
        return -(-sequences // _QUARTERS) if is_worth_it else sequences

    def _make_parts(self) -> None:
        """An index for each micro-batch of each layer, or no division if an index has no parts."""
        device, host = self._memories
        while len(self._scratches) < len(self._rows):
            scratch = Scratch(host)
            own = scratch if device is host else Scratch(device)
            self._scratches.append((own, scratch))
        self._parts = []
        for layer in self._layers if len(self._rows) > 1 else ():
            parts = [
                layer.index.part(rows, *scratches)
                for rows, scratches in zip(self._rows, self._scratches, strict=False)
            ]
            self._parts.append([part for part in parts if part is not None])
        if not self._parts or any(len(parts) < len(self._rows) for parts in self._parts):
            self._rows = [slice(0, len(self._layers[0].segments))]
            self._parts = [[layer.index] for layer in self._layers]
        self._sizes = [[()] * len(self._rows) for _ in self._layers]

    def _layer_step(self, asked: Question) -> LayerStep:
        return self._step_of(asked, self._rows, self._parts[asked.number])

    def _step_of(self, asked: Question, rows: Sequence[slice], parts: Sequence[Index]) -> LayerStep:
        number = asked.number
        return LayerStep(
            self._store, self._rules, self._attending, self._layers[number], number, rows, parts,
            asked.query, asked.budgets[number], asked.most_residents,
        )  # fmt: skip

    def _tasks_of(self, number: int) -> Schedule:
        """The schedule; with the layer's number and the step's for a timeline."""
        if self._timeline is None:
            return self._tasks
        return [task._replace(layer=number, step=self._step) for task in self._tasks]

    # Update

    def update(self, number: int, call: Callable[[], None]) -> None:
        """What a layer must know before its next step; it may go on beside what follows.

        Then its errors come with `settle`.
        """
        tasks = [Task("update", "cpu", self._step, number, -1, ())]
        calls = {"update": lambda _: call()}
        if self.is_overlapped:
            self._updating = self._pipeline.start(tasks, calls)
        else:
            perform(tasks, calls, self._timeline)
