"""What one engine does, as its caller asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.errors import ConfigError
from tierstore.hysteresis import Hysteresis
from tierstore.indexers import IndexShape
from tierstore.memory import unlimited
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.sync import SyncLevel
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Ids, Selection
    from tierstore.policies.plan import Plan
    from tierstore.policies.profile import Amounts

    SelectionListener = Callable[[int, Ids, Selection], None]
    """Is told, before the blocks are fetched: layer, blocks of its rows [R], what was selected."""


def filter_for(amount: float | str | None, preset: Preset, geometry: Geometry) -> Hysteresis:
    """The fetch filter; ConfigError for one that the preset's index gives nothing to compare."""
    hysteresis = Hysteresis(preset.hysteresis if amount is None else amount)
    if not hysteresis.is_on:
        return hysteresis
    memory = unlimited()
    index = preset.index(
        IndexShape(
            geometry.group, geometry.head_dim, geometry.dtype, preset.block_tokens, 1.0, memory,
            Scratch(memory),
        )
    )  # fmt: skip
    if not index.gives_scores:
        raise ConfigError(
            f"hysteresis: the index of preset {preset.name!r} gives no scores to compare: expected "
            "hysteresis=0, or another preset"
        )
    return hysteresis


class Rules(NamedTuple):
    """What one engine does: its model, its preset, and the numbers that override the preset's."""

    geometry: Geometry
    preset: Preset
    budget: float | int
    window: float | None
    hysteresis: Hysteresis
    plan: Plan | None
    recalibrate: int | None
    record: bool
    on_selection: SelectionListener | None = None
    sync: SyncLevel | None = None
    stalls: Amounts | None = None

    @property
    def attends_residents(self) -> bool:
        """Whether a step attends to everything in the top tier."""
        wants = self.preset.attends_residents or self.hysteresis.is_on
        return wants and self.window is not None
