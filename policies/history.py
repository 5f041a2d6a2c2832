"""What is remembered of every block from step to step, resident or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.arguments import is_number
from tierstore.errors import ConfigError
from tierstore.kernels import histories
from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory import Column, HandleSpace
    from tierstore.interfaces import Access, BlockScores, Ids, Scores


LEAST_MASS = -20.72
"""Log of an attention mass of 1e-9: what is smaller is nothing."""

_AT_ONCE = 1 << 16
"""Scores gathered at once, or one row's: the work space is no part of the limit, so it is small."""


class ScoreHistory:
    """Exponentially weighted means of each block's scores; the least one before the first.

    Parameters
    ----------
    alphas: weight of the newest score in each of the means, in (0, 1].
    low, high: scores outside count as these, and a block without any as `low`.
    """

    def __init__(self, alphas: Sequence[float], low: float, high: float) -> None:
        for alpha in alphas:
            if not (is_number(alpha) and 0 < alpha <= 1):
                raise ConfigError(f"alpha={alpha!r}: expected a weight in (0, 1], for example 0.3")
        self._weights = np.array(alphas, np.float32)
        self._bounds = np.float32(low), np.float32(high)
        self._scores: Scores = np.empty(0, np.float32)

    def bind(self, space: HandleSpace) -> None:
        self._space = space
        self._means = [space.column(np.float32, fill=-np.inf) for _ in self._weights]

    def update(self, access: Access, shift: Scores | None = None) -> None:
        """Take in the step's scores, each less ``shift[row]``, of all blocks of its rows."""
        everything = access.everything
        if everything is None:
            return
        if shift is None:
            shift = np.zeros(len(everything.segments), np.float32)
        rows, width = len(everything.segments), everything.unit_of.shape[1]
        together = max(1, _AT_ONCE // max(width, 1))
        for first in range(0, rows, together):
            self._blend(everything, shift, slice(first, min(first + together, rows)))

    def _blend(self, everything: BlockScores, shift: Scores, rows: slice) -> None:
        space, segments = self._space, everything.segments[rows]
        unit_of = everything.unit_of if len(everything.unit_of) == 1 else everything.unit_of[rows]
        shape = (len(segments), unit_of.shape[1])
        if self._scores.size < shape[0] * shape[1]:
            self._scores = np.empty(shape[0] * shape[1], np.float32)
        scores = self._scores[: shape[0] * shape[1]].reshape(shape)
        histories.scores_of_blocks(
            space.blocks, segments, unit_of, everything.unit_scores[rows], shift[rows],
            *self._bounds, scores,
        )  # fmt: skip
        for weight, mean in zip(self._weights, self._means, strict=True):
            histories.blend(space.chunks, space.blocks, segments, scores, weight, mean.array)

    def mean(self, number: int, handles: Ids) -> Scores:
        """The mean of that number; the lower bound for blocks that never had a score."""
        means = _taken(handles, self._means[number])
        # Not -inf, which no other term of a sum could make up for.
        np.maximum(means, self._bounds[0], out=means)
        return means


class UseCount:
    """How often a block was selected; each step that its segment makes takes a share away.

    Parameters
    ----------
    decay: what is left of a use one step later, in [0, 1].
    """

    def __init__(self, decay: float) -> None:
        if not (is_number(decay) and 0 <= decay <= 1):
            raise ConfigError(f"decay={decay!r}: expected a factor in [0, 1], for example 0.95")
        self.decay = decay

    def bind(self, space: HandleSpace) -> None:
        self._space = space
        self._column = space.column(np.float32)

    def update(self, access: Access) -> None:
        """Count the step's uses."""
        segments = segments_of(access, self._space)
        histories.decay(
            self._space.chunks, self._space.blocks, segments, np.float32(self.decay),
            self._column.array,
        )  # fmt: skip
        histories.count_uses(access.handles, self._column.array)

    def uses(self, handles: Ids) -> Scores:
        """The uses that are left."""
        return _taken(handles, self._column)


def _taken(handles: Ids, column: Column) -> Scores:
    out: Scores = np.empty(len(handles), np.float32)
    histories.take(handles, column.array, out)
    return out


def segments_of(access: Access, space: HandleSpace) -> Ids:
    """The segments that make a step, each once."""
    if access.everything is not None:
        return access.everything.segments
    segments: Ids = np.unique(space.owner_segment[access.handles // CHUNK])
    return segments
