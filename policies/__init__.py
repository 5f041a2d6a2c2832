"""Who leaves when a tier is full: one policy per file."""

from tierstore.policies.lookahead import Lookahead
from tierstore.policies.lru import LRU
from tierstore.policies.random import Random
from tierstore.policies.ranked import BlockStats, RankedPolicy

__all__ = ["LRU", "BlockStats", "Lookahead", "Random", "RankedPolicy"]
