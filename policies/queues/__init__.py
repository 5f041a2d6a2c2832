"""Policies that keep an order, one per file: amortised O(1) or O(log n), for large domains."""

from tierstore.policies.queues.arc import ARC
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.belady import Belady
from tierstore.policies.queues.clock import CLOCK
from tierstore.policies.queues.fifo import FIFO
from tierstore.policies.queues.gdsf import GDSF, LFUDA
from tierstore.policies.queues.lfu import LFU
from tierstore.policies.queues.lirs import LIRS
from tierstore.policies.queues.lru import QueueLRU
from tierstore.policies.queues.mru import MRU
from tierstore.policies.queues.s3fifo import S3FIFO
from tierstore.policies.queues.sieve import SIEVE
from tierstore.policies.queues.slru import SLRU
from tierstore.policies.queues.tinylfu import WTinyLFU
from tierstore.policies.queues.two_queue import TwoQueue
from tierstore.policies.queues.workload import WorkloadAware

__all__ = [
    "ARC",
    "CLOCK",
    "FIFO",
    "GDSF",
    "LFU",
    "LFUDA",
    "LIRS",
    "MRU",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Belady",
    "QueueLRU",
    "QueuePolicy",
    "TwoQueue",
    "WTinyLFU",
    "WorkloadAware",
]
