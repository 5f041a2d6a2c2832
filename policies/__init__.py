"""Who leaves when a tier is full: one policy per file."""

from tierstore.policies.lookahead import Lookahead
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
    WTinyLFU,
)
from tierstore.policies.random import Random
from tierstore.policies.ranked import BlockStats, RankedPolicy

__all__ = [
    "ARC",
    "CLOCK",
    "FIFO",
    "GDSF",
    "LFU",
    "LFUDA",
    "LIRS",
    "LRU",
    "MRU",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Belady",
    "BlockStats",
    "Lookahead",
    "QueueLRU",
    "QueuePolicy",
    "Random",
    "RankedPolicy",
    "TwoQueue",
    "WTinyLFU",
]
