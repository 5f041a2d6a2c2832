"""One layer's decoding step on its way through the stages, micro-batch by micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.adapters.attention.attending import joined, nothing
from tierstore.arrays import as_array
from tierstore.interfaces import Selection
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.attending import Attending
    from tierstore.adapters.attention.layer import Layer
    from tierstore.adapters.attention.places import Places
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Ids, Index
    from tierstore.kernels.element import Array
    from tierstore.pipeline import Task
    from tierstore.store import BlockStore
    from tierstore.visits import PendingVisit, Visit


class LayerStep:
    """Selections, visits and output of one layer in one step; its methods are the stages.

    Parameters
    ----------
    layer, number: which layer. rows: of each micro-batch. parts: the index of each.
    query, budgets: [R, G, d] elements; int32 [R] blocks.
    most_residents: blocks that a row has in the top tier at most, if it attends to all of them.
    """

    def __init__(
        self,
        store: BlockStore,
        rules: Rules,
        attending: Attending,
        layer: Layer,
        number: int,
        rows: Sequence[slice],
        parts: Sequence[Index],
        query: Array,
        budgets: Ids,
        most_residents: int,
    ) -> None:
        self.layer, self.number, self.rows = layer, number, rows
        self.selections: list[Selection | None] = [None] * len(rows)
        self.is_news = [True] * len(rows)
        """Whether the policy has yet to hear of each selection."""
        self._store, self._rules, self._attending = store, rules, attending
        self.budgets = budgets
        self._parts, self._query = parts, query
        self._beside = attending.beside(query)
        self._most_residents = most_residents
        self._pending: list[PendingVisit | None] = [None] * len(rows)
        self._visits: list[Visit] = [nothing(0)] * len(rows)
        self._below: torch.Tensor | None = None
        """What was attended where it lies, float32 [R, G, e]."""

    def select(self, task: Task) -> None:
        """Ask the index with the true query, unless that has been done."""
        if self.selections[task.micro_batch] is None:
            self.select_part(task.micro_batch)
        if self._rules.on_selection is not None:
            selection = self.selections[task.micro_batch]
            assert selection is not None
            self._rules.on_selection(self.number, self.layer.blocks, selection)

    def select_part(self, part: int) -> None:
        """Ask the index for a micro-batch."""
        rows, layer = self.rows[part], self.layer
        query, beside = self._query[rows], self._beside[rows]
        kernels.weigh_strips(
            query, layer.strip_key[rows], layer.strip_length[rows], self._attending.scale, beside
        )
        self.selections[part] = self._parts[part].select(query, self.budgets[rows], beside)

    def adopt(self, guess: LayerStep) -> None:
        """Take over what another step selected and, as far as it fitted, fetched."""
        self.selections, self.is_news = guess.selections, guess.is_news

    @property
    def has_work_space(self) -> bool:
        """Whether `take_work_space` finds what it needs."""
        return self._attending.has_work_space(self.layer, self._most())

    def take_work_space(self) -> None:
        """For the attention to everything selected, or to what the budgets allow."""
        self._attending.take_work_space(self.layer, self._most())

    def _most(self) -> int:
        """Blocks that a row attends to at most."""
        index, layer = self.layer.index, self.layer
        if len(self.rows) == 1 and (selection := self.selections[0]) is not None:
            most = int((selection.row_ptr[1:] - selection.row_ptr[:-1]).max())
        else:
            wanted = np.maximum(self.budgets, index.least) + index.kept
            most = int(np.minimum(wanted, layer.blocks).max())
        return max(most, self._most_residents)

    def attend_below(self, places: Places) -> None:
        """Attend to blocks where they lie; the others are left. Requires: one micro-batch."""
        selection, attending = self.selections[0], self._attending
        assert selection is not None
        result = attending.result(self._query)
        visit, self.selections[0] = places.attend(
            self.number, self.layer.segments, self._query, selection, result, attending.lse
        )
        if visit is not None:
            self._below = to_tensor(result)
            attending.note(self.number, self.layer, visit, is_first=True)

    def judge(self, task: Task) -> None:
        """Find the misses of a micro-batch, and room for them."""
        selection, rows = self.selections[task.micro_batch], self.rows[task.micro_batch]
        assert selection is not None
        self._pending[task.micro_batch] = self._store.judge(
            selection,
            self.layer.segments[rows],
            hysteresis=self._rules.hysteresis.delta,
            is_news=self.is_news[task.micro_batch],
        )

    def fetch(self, task: Task) -> None:
        """Bring the misses of a micro-batch, unless it has to come in several visits."""
        pending = self._pending[task.micro_batch]
        assert pending is not None
        if pending.is_whole:
            self._visits[task.micro_batch] = pending.fetch()
            self.is_news[task.micro_batch] = False

    def compute(self, out: torch.Tensor) -> None:
        """Attend with all rows, and then in turn to what does not fit the top tier at once.

        out: [R, G, e]; rows of no micro-batch stay as they are.
        """
        layer, attending = self.layer, self._attending
        every = slice(self.rows[0].start, self.rows[-1].stop)
        pending = [each for each in self._pending if each is not None]
        if self._below is None and all(each.is_whole for each in pending):
            visit = self._attended(layer.segments[every], self._visits)
            attending.attend(layer, self._query, visit, as_array(out), rows=every)
            attending.note(self.number, layer, visit, first_row=every.start, is_first=True)
            return
        result, merge = self._below, True
        if result is None:
            merge = False
            result = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for part, each in enumerate(pending):
            rows = self.rows[part]
            visit = nothing(len(layer.segments[rows]))
            if each.is_whole:
                visit = self._attended(layer.segments[rows], self._visits[part : part + 1])
            self._attend_rows(visit, part, result, merge=merge)
            for visit in () if each.is_whole else each.visits():
                self._attend_rows(visit, part, result, merge=True, strips=False)
        out[every].copy_(result[every])

    def _attended(self, segments: Ids, visits: Sequence[Visit]) -> Visit:
        """What rows attend to whose selections have all come."""
        return self._store.residents(segments) if self._rules.attends_residents else joined(visits)

    def _attend_rows(
        self, visit: Visit, part: int, out: torch.Tensor, *, merge: bool, strips: bool = True
    ) -> None:
        rows, attending = self.rows[part], self._attending
        attending.attend(
            self.layer, self._query, visit, as_array(out), rows=rows, merge=merge, strips=strips
        )
        attending.note(self.number, self.layer, visit, first_row=rows.start, is_first=not merge)

    def release(self) -> None:
        """Let the blocks go; nobody may be fetching."""
        for part in range(len(self._pending)):
            self.release_part(part)

    def release_part(self, part: int) -> None:
        """Let the blocks of a micro-batch go."""
        pending, self._pending[part] = self._pending[part], None
        if pending is not None:
            pending.release()


def copied(selection: Selection) -> Selection:
    """A selection that outlives the next one of its index, all but the scores of everything."""
    return Selection(
        selection.row_ptr.copy(), selection.ids.copy(), selection.scores.copy(),
        selection.everything,
    )  # fmt: skip
