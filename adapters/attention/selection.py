"""Parts of what an index selects."""

from __future__ import annotations

from tierstore.interfaces import BlockScores, Selection


def of_rows(selection: Selection, rows: slice) -> Selection:
    """What is selected for some rows that stand together."""
    row_ptr = selection.row_ptr[rows.start : rows.stop + 1]
    chosen = slice(int(row_ptr[0]), int(row_ptr[-1]))
    scores = selection.everything
    if scores is not None:
        units = scores.unit_of if len(scores.unit_of) == 1 else scores.unit_of[rows]
        scores = BlockScores(scores.unit_scores[rows], units, scores.segments[rows])
    return Selection(row_ptr - row_ptr[0], selection.ids[chosen], selection.scores[chosen], scores)
