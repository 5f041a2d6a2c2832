"""The places where blocks can be."""

from tierstore.tiers.device import DeviceTier
from tierstore.tiers.file import FileTier
from tierstore.tiers.gds import GdsTier
from tierstore.tiers.mmap import MmapTier
from tierstore.tiers.pinned import PinnedTier
from tierstore.tiers.redis_records import RedisRecords
from tierstore.tiers.redis_tier import RedisTier

__all__ = [
    "DeviceTier",
    "FileTier",
    "GdsTier",
    "MmapTier",
    "PinnedTier",
    "RedisRecords",
    "RedisTier",
]
