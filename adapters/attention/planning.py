"""Plans made from what a run selected, and the checks of windows and plans that it is given."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError
from tierstore.indexers import HierarchicalIndex
from tierstore.policies.plan import Plan
from tierstore.policies.windows import WINDOWS, allocate_windows
from tierstore.sizes import MOST, check_window

if TYPE_CHECKING:
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.rules import Rules
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Ids
    from tierstore.policies.profile import Amounts, ReuseProfile


def plan_for(plan: Plan | str | Path, geometry: Geometry) -> Plan:
    """The plan itself, or the one in that file; ConfigError if it is for another model."""
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    plan.check_model(geometry.layers, geometry.kv_heads, geometry.query_heads, geometry.head_dim)
    return plan


def tuned(preset: Preset, plan: Plan | None) -> Preset:
    """The preset with what a plan says of its index, if that is one of clusters."""
    settings = None if plan is None else plan.tuning
    if settings is None or settings.tokens_per_centroid is None:
        return preset
    if preset.index is not HierarchicalIndex:
        return preset
    index = partial(HierarchicalIndex, tokens_per_centroid=settings.tokens_per_centroid)
    return replace(preset, index=index)


def micro_batch_for(micro_batch: int | None, plan: Plan | None) -> int | None:
    """Sequences of a micro-batch: as given, or as tuned; None for neither."""
    if micro_batch is not None or plan is None or plan.tuning is None:
        return micro_batch
    return plan.tuning.micro_batch


def window_for(
    window: float | None, plan: Plan | None, *, has_fast: bool, fallback: float | None
) -> float | None:
    """Capacity of the fast tier in budgets: as given, as planned, or else `fallback`.

    None without a fast tier. ConfigError for a window that cannot be, or is not the plan's.
    """
    if window is not None:
        check_window(window)
    if window is not None and not has_fast:
        raise ConfigError(f"window={window}: there is no fast tier: pass fast= or no window=")
    if not has_fast:
        return None
    if plan is None:
        return fallback if window is None else window
    if window is not None and not math.isclose(window, plan.window, rel_tol=0.01):
        raise ConfigError(
            f"window={window}: the plan is for a window of {plan.window:.3g} budgets: "
            "pass no window=, or another plan"
        )
    return plan.window


def live_plan(
    profile: ReuseProfile, segments: Ids, budgets: Amounts, rules: Rules, old: Plan | None
) -> Plan:
    """Windows by what a run selected so far, at the same total as before; budgets stay.

    Whatever plan was in force, there is a new one: where its total is less than the budgets,
    rounded up, the new windows are those.

    Some tens of steps say less of a head than whole documents do, so that what an old plan knows
    counts as much.

    segments: those of all layers, sequences and heads. budgets: float64 [layers, sequences, KV
    heads], mean budgets in blocks.
    """
    assert rules.window is not None
    shape = budgets.shape[0], budgets.shape[2]
    shares = None if old is None else old.budgets
    factors = np.ones(shape) if shares is None else shares
    own = np.maximum(np.rint(budgets * factors[:, None]), 1)
    missed = profile.misses(segments, own.reshape(-1, 1) * WINDOWS)
    misses = missed.reshape(*budgets.shape, -1).sum(1) / budgets.sum(1)[..., None]
    if old is not None and old.misses is not None:
        misses = (misses + old.misses) / 2
    windows = allocate_windows(misses.reshape(-1, len(WINDOWS)), rules.window, factors.ravel())
    facts = {} if old is None else dict(old.facts)
    facts |= {"recalibrated_after": profile.steps}
    sizes = rules.geometry.query_heads, rules.geometry.head_dim
    others = (None, None) if old is None else (old.pinned, old.tuning)
    return Plan(windows.reshape(shape), *sizes, shares, misses, facts, *others)


def check_planning(window: float | None, plan: Plan | None, recalibrate: int | None) -> None:
    """ConfigError where there is no window to share out, or nothing to learn from."""
    if recalibrate is not None and not 1 <= recalibrate <= MOST:
        raise ConfigError(
            f"recalibrate={recalibrate}: expected a number of steps >= 1 and <= {MOST}, for "
            "example 64"
        )
    if window is None and (plan is not None or recalibrate is not None):
        raise ConfigError(
            "plan=, recalibrate=: there is no fast tier to share out: pass fast= and another tier"
        )
