"""What one engine does, as its caller asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.hardware import PRESETS
from tierstore.hysteresis import Hysteresis
from tierstore.indexers import IndexShape
from tierstore.memory import unlimited
from tierstore.schedules import SCHEDULES
from tierstore.scratch import Scratch
from tierstore.sizes import MOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.sync import SyncLevel
    from tierstore.adapters.presets import Preset
    from tierstore.hardware import Hardware
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


def schedule_for(schedule: str | None, micro_batch: int | None, preset: Preset) -> str:
    """The schedule, the preset's by default; ConfigError for one that there is not."""
    name = preset.schedule if schedule is None else schedule
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}")
    if micro_batch is not None:
        check_whole("micro_batch", micro_batch, 1, MOST)
    return name


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
    attend_where: str = "fetch"
    hardware: Hardware = PRESETS["reference"]
    schedule: str = "sequential"
    micro_batch: int | None = None
    sync: SyncLevel | None = None
    stalls: Amounts | None = None

    @property
    def attends_residents(self) -> bool:
        """Whether a step attends to everything in the top tier."""
        wants = self.preset.attends_residents or self.hysteresis.is_on
        return wants and self.window is not None
