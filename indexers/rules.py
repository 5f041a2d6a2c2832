"""How the query heads of a row agree on what is critical, and how much of it there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.errors import ConfigError

AGGREGATES = "sum", "max", "mean_group", "mean_all", "per_query"


@dataclass(frozen=True)
class Rule:
    """From the logits of every query head to one score for each unit of a row.

    Attributes
    ----------
    aggregate: over the query heads of a row: their ``"sum"``, ``"max"`` or ``"mean_group"``;
        ``"mean_all"`` averages over all heads of a sequence, which then select alike; with
        ``"per_query"`` every head ranks the units for itself, and the row goes down all rankings
        at once until its budget is full.
    softmax: whether a head's logits become masses (normalised over the row's units, each counted as
        often as it has tokens) before they are combined.
    threshold: select only what scores within so many nats of the row's best, by the number that
        meets this on average over the heads of a sequence (InfiniGen's alpha). The budget is then
        the most that is selected.
    by_size: whether the softmax counts a unit as often as it has tokens, or once (RetroInfer).
    """

    aggregate: str = "sum"
    softmax: bool = True
    threshold: float | None = None
    by_size: bool = True

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise ConfigError(
                f"aggregate={self.aggregate!r}: expected one of {', '.join(AGGREGATES)}"
            )
        if self.threshold is not None and not 0 <= self.threshold < math.inf:
            raise ConfigError(f"threshold={self.threshold}: expected nats >= 0, or None")
        if self.threshold is not None and self.aggregate == "per_query":
            raise ConfigError("threshold= with aggregate='per_query': ranks have no distance")
