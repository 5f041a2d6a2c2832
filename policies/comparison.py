"""Policies for attention beside each other on one trace, between the last used and the future."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.policies.attention import ATTENTION_POLICIES, Place
from tierstore.policies.clairvoyant import Clairvoyant
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierstore.interfaces import EvictionPolicy, Selection
    from tierstore.traces.attention import AttentionTrace

BASELINE, CEILING = "lru", "belady"
FIRST_STEP = 16
"""Windows begin empty: the steps before are not counted, where there are that many."""


class Outcome(NamedTuple):
    """What a policy did from `FIRST_STEP` on: hit ratio, and blocks fetched in a step."""

    hit_ratio: float
    moved: float


def compare(
    trace: AttentionTrace,
    selections: Sequence[Selection],
    names: Iterable[str],
    place: Place,
    blocks: int,
) -> dict[str, Outcome]:
    """What policies of those names do with the trace's selections; `CEILING` knows them all.

    Parameters
    ----------
    place: what policies are told of their windows. blocks: that fit each of them.
    """
    sizes = np.full(trace.segments, blocks, np.int64)
    first = min(FIRST_STEP, trace.steps - 1)
    outcomes = {}
    for name in names:
        result = replay(trace, _made(name, place, selections), sizes, selections)
        moved = float(result.fetched[first:].sum(1).mean())
        outcomes[name] = Outcome(result.hit_ratio(first), moved)
    return outcomes


def _made(name: str, place: Place, selections: Sequence[Selection]) -> EvictionPolicy:
    return Clairvoyant.of(selections) if name == CEILING else ATTENTION_POLICIES[name](place)


def gap_closed(hits: float, low: float, high: float) -> float | None:
    """Share of the gain of `high` over `low`; None where there is none."""
    return (hits - low) / (high - low) if high > low else None
