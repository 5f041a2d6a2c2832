"""Named compositions of index, policy and rules: published systems, and yardsticks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.hysteresis import parse_hysteresis
from tierstore.indexers import (
    ChunkMeanIndex,
    Everything,
    ExactIndex,
    HierarchicalIndex,
    IndexShape,
    WeightedPQIndex,
)
from tierstore.placement import RANKINGS
from tierstore.policies import DEFAULT_FOR_ATTENTION, LRU, Lookahead, Random
from tierstore.sizes import check_window, parse_budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.interfaces import EvictionPolicy, Index


@dataclass(frozen=True)
class Preset:
    """What a system is made of.

    Attributes
    ----------
    index: how to make the index of one layer.
    policy: how to make the policy of the fast tier; `DEFAULT_FOR_ATTENTION` unless the system has
        one of its own.
    block_tokens: consecutive tokens in a block.
    budget: default share of the context (float) or tokens (int) that each step selects.
    sinks, local: first and most recent tokens, always resident and attended, outside the budget.
    window: capacity of the fast tier in budgets; the largest that fits, if that is less.
    attends_residents: attend to everything in the fast tier, not only to what was selected.
    observation: how many last prompt tokens rank the prompt's blocks for placement.
    ranking: what their attention is summed over for that: one of `tierstore.placement.RANKINGS`.
    hysteresis: nats by which a missing block must beat the last one selected to be fetched, or the
        bytes that a step should fetch (``"512KiB"``); 0 fetches all. Otherwise a step attends to
        everything in the fast tier.
    schedule: in which order stages follow each other over a batch, see
        `tierstore.pipeline.schedule`.
    """

    name: str
    index: Callable[[IndexShape], Index]
    policy: Callable[[], EvictionPolicy] = DEFAULT_FOR_ATTENTION
    block_tokens: int = 4
    budget: float | int = 0.0625
    sinks: int = 4
    local: int = 64
    window: float = 2.0
    attends_residents: bool = False
    observation: int = 16
    ranking: str = "head"
    hysteresis: float | str = 0.0
    schedule: str = "sfc"

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        parse_hysteresis(self.hysteresis)
        check_window(self.window)
        if self.block_tokens < 1 or self.sinks < 0 or self.local < 1 or self.observation < 1:
            raise ConfigError(
                f"preset {self.name!r}: expected block_tokens, local and observation >= 1 "
                f"and sinks >= 0, found {self.block_tokens}, {self.local}, "
                f"{self.observation} and {self.sinks}"
            )
        if self.ranking not in RANKINGS:
            raise ConfigError(
                f"preset {self.name!r}: ranking={self.ranking!r}: expected one of "
                f"{', '.join(RANKINGS)}"
            )


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("kvdrive", HierarchicalIndex, Lookahead, attends_residents=True, ranking="global"),
        Preset("best", WeightedPQIndex, attends_residents=True),
        Preset("chunk-mean", ChunkMeanIndex, LRU, block_tokens=8),
        Preset("exact", ExactIndex, Lookahead),
        Preset("random", ExactIndex, Random),
        Preset("full", Everything, LRU, budget=1.0),
    )
}


def preset_named(preset: str | Preset) -> Preset:
    """The preset itself, or the one called so; ConfigError lists the names."""
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ConfigError(f"preset={preset!r}: expected one of {', '.join(PRESETS)}, or a Preset")
    return PRESETS[preset]
