"""Who leaves when a tier is full: one policy per file."""

from tierstore.policies.adaptive import Adaptive
from tierstore.policies.blend import Blend
from tierstore.policies.clairvoyant import Clairvoyant
from tierstore.policies.ewma import EWMA
from tierstore.policies.ewma_use import EwmaUse
from tierstore.policies.fair import FairShares
from tierstore.policies.lookahead import Lookahead
from tierstore.policies.lrfu import LRFU
from tierstore.policies.lru import LRU
from tierstore.policies.queues import (
    ARC,
    CLOCK,
    FIFO,
    GDSF,
    LFU,
    LFUDA,
    LIRS,
    MRU,
    S3FIFO,
    SIEVE,
    SLRU,
    Belady,
    QueueLRU,
    QueuePolicy,
    TwoQueue,
    WorkloadAware,
    WTinyLFU,
)
from tierstore.policies.random import Random
from tierstore.policies.ranked import BlockStats, RankedPolicy

DEFAULT_FOR_ATTENTION = Blend
"""The policy that fetched least for attention, of every preset that names none; see
docs/attention-policies.md."""

__all__ = [
    "ARC",
    "CLOCK",
    "DEFAULT_FOR_ATTENTION",
    "EWMA",
    "FIFO",
    "GDSF",
    "LFU",
    "LFUDA",
    "LIRS",
    "LRFU",
    "LRU",
    "MRU",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Adaptive",
    "Belady",
    "Blend",
    "BlockStats",
    "Clairvoyant",
    "EwmaUse",
    "FairShares",
    "Lookahead",
    "QueueLRU",
    "QueuePolicy",
    "Random",
    "RankedPolicy",
    "TwoQueue",
    "WTinyLFU",
    "WorkloadAware",
]
