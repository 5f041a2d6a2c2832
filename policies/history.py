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

    import numpy.typing as npt

    from tierstore.directory import Column, HandleSpace
    from tierstore.interfaces import Access, Ids, Scores


LEAST_MASS = -20.72
"""Log of an attention mass of 1e-9: what is smaller is nothing."""

_MOST_SCALE = 1e15
"""Of counted uses: far from the largest float32, and rarely reached."""


class ScoreHistory:
    """Exponentially weighted means of each block's scores; the least one before the first.

    Parameters
    ----------
    alphas: weight of the newest score in each of the means, in (0, 1]; or two, of a score above the
        mean and of one below.
    low, high: scores outside count as these, and a block without any as `low`.
    lean: part that a block takes of what the block before it scores more, in [0, 1].
    """

    def __init__(
        self,
        alphas: Sequence[float | tuple[float, float]],
        low: float,
        high: float,
        lean: float = 0.0,
    ) -> None:
        pairs = [alpha if isinstance(alpha, tuple) else (alpha, alpha) for alpha in alphas]
        for alpha in (alpha for pair in pairs for alpha in pair):
            if not (is_number(alpha) and 0 < alpha <= 1):
                raise ConfigError(f"alpha={alpha!r}: expected a weight in (0, 1], for example 0.3")
        if not (is_number(lean) and 0 <= lean <= 1):
            raise ConfigError(f"lean={lean!r}: expected a part in [0, 1], for example 0.2")
        self._rise, self._fall = np.array(pairs, np.float32).T.copy()
        self._bounds = np.float32(low), np.float32(high)
        self._lean = np.float32(lean)
        self._work: Scores = np.empty((2, 1, 0), np.float32)

    def bind(self, space: HandleSpace) -> None:
        self._space = space
        self._means = [space.column(np.float32, fill=-np.inf) for _ in self._rise]

    def update(self, access: Access, shift: Scores | None = None) -> None:
        """Take in the step's scores, each less ``shift[row]``, of all blocks of its rows."""
        everything = access.everything
        if everything is None:
            return
        if shift is None:
            shift = np.zeros(len(everything.segments), np.float32)
        width = everything.unit_of.shape[1]
        if self._work.shape[2] < width:
            self._work = np.empty((2, 1, width), np.float32)
        scores, leaned = self._work[:, :, :width]
        space = self._space
        histories.remember(
            space.chunks, space.blocks, everything.segments, everything.unit_of,
            everything.unit_scores, shift, *self._bounds, self._lean, self._rise, self._fall,
            tuple(mean.array for mean in self._means), scores, leaned,
        )  # fmt: skip

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
        self._scale: npt.NDArray[np.float64] = np.ones(0)

    def update(self, access: Access) -> None:
        """Count the step's uses."""
        space, column = self._space, self._column.array
        more = len(space.blocks) - len(self._scale)
        if more > 0:
            self._scale = np.concatenate([self._scale, np.ones(more)])
        segments = segments_of(access, space)
        histories.age(
            space.chunks, space.blocks, segments, self.decay, _MOST_SCALE, self._scale, column
        )
        histories.count_uses(access.handles, space.owner_segment, self._scale, column)

    def uses(self, handles: Ids) -> Scores:
        """The uses that are left."""
        out: Scores = np.zeros(len(handles), np.float32)
        if len(self._scale):
            histories.uses(handles, self._space.owner_segment, self._scale, self._column.array, out)
        return out


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
