"""The policies for attention by name, as commands and benchmarks make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.policies.adaptive import Adaptive
from tierstore.policies.blend import Blend
from tierstore.policies.ewma import EWMA
from tierstore.policies.ewma_use import EwmaUse
from tierstore.policies.lookahead import Lookahead
from tierstore.policies.lrfu import LRFU
from tierstore.policies.lru import LRU
from tierstore.policies.random import Random

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.interfaces import EvictionPolicy


class Place(NamedTuple):
    """Where a policy is to work: `blocks` are a budget, `window` budgets fit."""

    window: float
    blocks: int


ATTENTION_POLICIES: dict[str, Callable[[Place], EvictionPolicy]] = {
    "random": lambda _: Random(),
    "lru": lambda _: LRU(),
    "lrfu": lambda _: LRFU(),
    "lookahead-pool": lambda place: Lookahead(pool=2 * place.blocks),
    "lookahead": lambda _: Lookahead(),
    "ewma": lambda _: EWMA(),
    "ewma-use": lambda _: EwmaUse(),
    "blend": lambda _: Blend(),
    "adaptive": lambda place: Adaptive(window=place.window),
}
"""Those that use scores, and the plain ones that they are compared with."""
