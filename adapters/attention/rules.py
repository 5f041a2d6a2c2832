"""What one engine does, as its caller asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.presets import Preset
    from tierstore.hysteresis import Hysteresis
    from tierstore.interfaces import Ids, Selection
    from tierstore.policies.plan import Plan

    SelectionListener = Callable[[int, Ids, Selection], None]
    """Is told, before the blocks are fetched: layer, blocks of its rows [R], what was selected."""


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

    @property
    def attends_residents(self) -> bool:
        """Whether a step attends to everything in the top tier."""
        wants = self.preset.attends_residents or self.hysteresis.is_on
        return wants and self.window is not None
