"""Lanes of a batch: places for one sequence each, which are used again by others.

A lane's rows exist in every layer; what is known of the sequence in it stands here, in arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Pointers


class Admitted(NamedTuple):
    """What a sequence was let in for.

    tokens: that it may have in the end, for which there is room. budget: share of its context
    (float), or tokens (int), that a step selects.
    """

    tokens: int
    budget: float | int


class Lanes:
    """What each lane is used for.

    Attributes
    ----------
    live: bool [B], lanes with a sequence.
    tokens: int64 [B], tokens of the sequence so far; 0 in a free lane.
    promised: int64 [B], tokens that it may have in the end; 0 in a free lane.
    shares, counts: float64 [B], the budget is ``shares * tokens + counts`` tokens.
    """

    def __init__(self, admitted: Sequence[Admitted]) -> None:
        count = len(admitted)
        self.live: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.tokens: Pointers = np.zeros(count, np.int64)
        self.promised: Pointers = np.zeros(count, np.int64)
        self.shares = np.zeros(count)
        self.counts = np.zeros(count)
        for lane, each in enumerate(admitted):
            self.enter(lane, each)

    def __len__(self) -> int:
        return len(self.live)

    def enter(self, lane: int, admitted: Admitted) -> None:
        """Let a new sequence, which has no token yet, have a free lane."""
        budget = admitted.budget
        self.live[lane] = True
        self.promised[lane] = admitted.tokens
        self.shares[lane] = budget if isinstance(budget, float) else 0.0
        self.counts[lane] = 0.0 if isinstance(budget, float) else float(budget)

    def leave(self, lane: int) -> None:
        """Free a lane."""
        self.live[lane] = False
        self.tokens[lane] = self.promised[lane] = 0

    def arranged(self, sources: Sequence[int]) -> Self:
        """Lane i as lane ``sources[i]``."""
        chosen, other = np.array(sources, np.int64), type(self)(())
        for name, old in vars(self).items():
            setattr(other, name, old[chosen])
        return other

    def with_more(self, lanes: int) -> Self:
        """These, and so many free ones after them."""
        other = type(self)(())
        for name, old in vars(self).items():
            setattr(other, name, np.concatenate([old, np.zeros(lanes, old.dtype)]))
        return other

    def blocks(self, preset: Preset) -> Pointers:
        """Blocks that each row of the lanes' sequences may have in the end."""
        tokens = np.maximum(self.promised, self.tokens) - preset.sinks - preset.local
        blocks: Pointers = np.maximum(tokens, 0) // preset.block_tokens
        return blocks

    def budgets(self, block_tokens: int) -> Pointers:
        """Blocks that a row of each lane may select, at least one and at most all."""
        tokens = self.tokens * self.shares + self.counts
        blocks = np.clip(np.ceil(tokens / block_tokens - 1e-9), 1, self.tokens // block_tokens + 1)
        return blocks.astype(np.int64)
