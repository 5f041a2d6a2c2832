"""Who leaves when a tier is full: one policy per file."""

from tierstore.policies.adaptive import Adaptive
from tierstore.policies.blend import Blend
from tierstore.policies.clairvoyant import Clairvoyant
from tierstore.policies.ewma import EWMA
from tierstore.policies.ewma_use import EwmaUse
from tierstore.policies.lookahead import Lookahead
from tierstore.policies.lrfu import LRFU
from tierstore.policies.lru import LRU
from tierstore.policies.random import Random
from tierstore.policies.ranked import BlockStats, RankedPolicy

DEFAULT_FOR_ATTENTION = Blend
"""Makes the policy that fetched least for attention; docs/policies.md says how it was chosen."""

__all__ = [
    "DEFAULT_FOR_ATTENTION",
    "EWMA",
    "LRFU",
    "LRU",
    "Adaptive",
    "Blend",
    "BlockStats",
    "Clairvoyant",
    "EwmaUse",
    "Lookahead",
    "Random",
    "RankedPolicy",
]
