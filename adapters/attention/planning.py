"""Plans made from what a run selected, and the checks of plans that a run is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError
from tierstore.policies.plan import Plan
from tierstore.policies.windows import WINDOWS, allocate_windows

if TYPE_CHECKING:
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Ids
    from tierstore.policies.profile import Amounts, ReuseProfile


def plan_for(plan: Plan | str | Path, geometry: Geometry) -> Plan:
    """The plan itself, or the one in that file; ConfigError if it is for another model."""
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    plan.check_model(geometry.layers, geometry.kv_heads, geometry.query_heads, geometry.head_dim)
    return plan


def live_plan(
    profile: ReuseProfile, segments: Ids, budgets: Amounts, rules: Rules, old: Plan | None
) -> Plan:
    """Windows by what a run selected so far, at the same total as before; budgets stay.

    segments: those of all layers, sequences and heads. budgets: float64 [layers, sequences, KV
    heads], mean budgets in blocks.
    """
    assert rules.window is not None
    shares = None if old is None else old.budgets
    ones = np.ones((budgets.shape[0], budgets.shape[2]))
    own = np.maximum(np.rint(budgets * (ones if shares is None else shares)[:, None]), 1)
    sizes = own.reshape(-1, 1) * WINDOWS
    misses = profile.misses(segments, sizes).reshape(*budgets.shape, -1).sum(1)
    windows = allocate_windows(
        misses.reshape(-1, len(WINDOWS)), rules.window, None if shares is None else shares.ravel()
    )
    geometry = rules.geometry
    facts = {} if old is None else dict(old.facts)
    facts |= {"recalibrated_after": profile.steps}
    return Plan(windows.reshape(ones.shape), geometry.query_heads, geometry.head_dim, shares, facts)


def check_planning(window: float | None, plan: Plan | None, recalibrate: int | None) -> None:
    """ConfigError where there is no window to share out, or nothing to learn from."""
    if recalibrate is not None and recalibrate < 1:
        raise ConfigError(
            f"recalibrate={recalibrate}: expected a number of steps >= 1, for example 64"
        )
    if window is None and (plan is not None or recalibrate is not None):
        raise ConfigError(
            "plan=, recalibrate=: there is no fast tier to share out: pass fast= and another tier"
        )
