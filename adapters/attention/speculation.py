"""Schedules that guess what a layer will select, to fetch it while something else computes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.attention.stages import Stages
from tierstore.adapters.attention.step import LayerStep, copied
from tierstore.interfaces import Selection
from tierstore.kernels.element import to_tensor
from tierstore.pipeline import STAGES, perform, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from tierstore.adapters.attention.attending import Attending
    from tierstore.adapters.attention.layer import Layer
    from tierstore.adapters.attention.rules import Rules
    from tierstore.adapters.attention.stages import Question
    from tierstore.kernels.element import Array
    from tierstore.memory import Memory
    from tierstore.pipeline import Run, Task
    from tierstore.store import BlockStore

_BRINGING = STAGES[1:4]
_SIMILAR = 0.8
"""FreeKV's threshold: rows whose queries have turned further from the last ones select anew."""


@dataclass(frozen=True)
class _Guess:
    """Blocks on their way into the top tier for a step to come.

    query: what selected them, float32 [R, G, d].
    """

    step: LayerStep
    run: Run
    query: torch.Tensor

    def wait(self) -> None:
        """Return when they have come; raise what went wrong."""
        try:
            self.run.wait()
        finally:
            self.step.release()


class Speculative(Stages):
    """What schedules that guess have in common: blocks are brought early and judged again in time.

    What was guessed is let go as soon as it has come. A layer has its domains of the top tier to
    itself, so it is still there in the layer's own step, unless new blocks pushed it out. Guesses
    are selected by the caller, who has one work space for all, and judged and fetched by others.
    """

    def __init__(
        self,
        store: BlockStore,
        rules: Rules,
        attending: Attending,
        layers: Sequence[Layer],
        memories: tuple[Memory, Memory],
    ) -> None:
        super().__init__(store, rules, attending, layers, memories)
        self._guesses: dict[int, _Guess] = {}

    def settle(self) -> None:
        super().settle()
        self._bring_in(list(self._guesses))

    def end_visits(self) -> None:
        for guess in self._guesses.values():
            with suppress(Exception):
                guess.wait()

    def drop_guesses(self) -> None:
        self.end_visits()
        self._guesses.clear()

    def forget(self) -> None:
        super().forget()
        self._guesses.clear()

    def update(self, number: int, call: Callable[[], None]) -> None:
        self.end_visits()
        # It knows nothing of the blocks that are about to come.
        self._guesses.pop(number, None)
        super().update(number, call)

    def _bring_in(self, layers: Sequence[int]) -> None:
        """Return when the guesses for these layers have come; after an error, all are forgotten."""
        try:
            for layer in layers:
                self._guesses[layer].wait()
        except BaseException:
            self.drop_guesses()
            raise

    def _select(self, step: LayerStep) -> None:
        """Select for all rows what outlives other selections."""
        self._perform("select", step, None)
        step.selections = [None if each is None else copied(each) for each in step.selections]

    def _perform(self, stages: str, step: LayerStep, out: torch.Tensor | None) -> None:
        """Do some of the stages in the calling thread."""
        chosen = [task for task in self._tasks_of(step.number) if task.stage in stages]

        def compute(_: Task) -> None:
            assert out is not None
            step.compute(out)

        calls = {
            "select": step.select, "judge": step.judge, "fetch": step.fetch, "compute": compute
        }  # fmt: skip
        perform(chosen, calls, self._timeline)

    def _attend(self, step: LayerStep, out: torch.Tensor) -> None:
        """All but the selection."""
        if not step.has_work_space:
            # It may have to come out of the slots, which blocks of a live visit prevent.
            self._bring_in(list(self._guesses))
            step.take_work_space()
        try:
            self._perform("judge fetch compute", step, out)
        finally:
            step.release()

    def _guess(self, step: LayerStep, query: Array) -> None:
        """Begin to bring what a step will want that has selected."""

        def fetch(task: Task) -> None:
            step.fetch(task)
            step.release_part(task.micro_batch)

        tasks = schedule("sfc", 1, len(self._rows), _BRINGING)[:-1]
        if self._timeline is not None:
            tasks = [task._replace(layer=step.number, step=self._step) for task in tasks]
        run = self._pipeline.start(tasks, {"judge": step.judge, "fetch": fetch})
        self._guesses[step.number] = _Guess(
            step, run, to_tensor(query).to(torch.float32, copy=True)
        )


class PreviousLayer(Speculative):
    """InfiniGen's schedule: while a layer computes, what the next one will ask for is fetched.

    A layer whose query nobody guessed selects with its true one, as the first layer does.
    """

    def attend(self, asked: Question, out: torch.Tensor) -> None:
        number = asked.number
        self._divide(number)
        step = self._layer_step(asked)
        if number in self._guesses:
            self._bring_in([number])
            step.adopt(self._guesses.pop(number).step)
        else:
            self._select(step)
        if asked.next_query is not None and number + 1 < len(self._layers):
            later = self._layer_step(asked._replace(number=number + 1, query=asked.next_query))
            self._select(later)
            self._guess(later, asked.next_query)
        self._attend(step, out)


class PreviousStep(Speculative):
    """FreeKV's schedule: a layer attends to what its last query selected, and selects meanwhile.

    Rows whose queries are less like the last ones than `_SIMILAR`, in the mean cosine over their
    heads, select anew before they attend.
    """

    def attend(self, asked: Question, out: torch.Tensor) -> None:
        number = asked.number
        self._divide(number)
        step = self._layer_step(asked)
        if self._grown_parts(step):
            # Work space may have to come out of the slots, which blocks of a live visit prevent.
            self._bring_in(list(self._guesses))
        guess = self._guesses.get(number)
        if guess is None:
            self._select(step)
        else:
            self._bring_in([number])
            del self._guesses[number]
            self._correct(step, guess, asked.query)
        self._attend(step, out)
        later = self._layer_step(asked)
        for other in self._guesses.values():
            other.run.wait_for("judge")
        self._select(later)
        self._guess(later, asked.query)

    def _correct(self, step: LayerStep, guess: _Guess, query: Array) -> None:
        """Take the guess over, but for rows whose queries have turned away."""
        asked = to_tensor(query).float()
        likeness = torch.cosine_similarity(asked, guess.query, dim=-1).mean(-1)
        turned = (likeness < _SIMILAR).cpu().numpy()
        if not turned.any():
            step.adopt(guess.step)
            return
        self._select(step)
        step.selections = [
            None if old is None or new is None else _spliced(old, new, turned[rows])
            for old, new, rows in zip(
                guess.step.selections, step.selections, self._rows, strict=True
            )
        ]


def _spliced(old: Selection, new: Selection, is_new: npt.NDArray[np.bool_]) -> Selection:
    """The new selection of some rows, the old one of the others."""
    kept = [_of_rows(old, ~is_new), _of_rows(new, is_new)]
    rows = np.concatenate([row for row, _ in kept])
    order = np.argsort(rows, kind="stable")
    positions = [chosen for _, chosen in kept]
    ids = np.concatenate([old.ids[positions[0]], new.ids[positions[1]]])[order]
    scores = np.concatenate([old.scores[positions[0]], new.scores[positions[1]]])[order]
    counts = np.bincount(rows, minlength=len(is_new))
    row_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Selection(row_ptr, ids, scores, new.everything)


def _of_rows(
    selection: Selection, chosen: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Rows and positions of what is selected in the chosen rows."""
    rows = np.repeat(np.arange(len(chosen)), np.diff(selection.row_ptr))
    positions = np.flatnonzero(chosen[rows])
    return rows[positions], positions


SPECULATIVE: dict[str, type[Speculative]] = {
    "previous-layer": PreviousLayer,
    "previous-step": PreviousStep,
}
"""Schedules that guess, by name."""
