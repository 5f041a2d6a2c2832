"""The places where blocks can be."""

from tierstore.tiers.device import DeviceTier
from tierstore.tiers.file import FileTier
from tierstore.tiers.gds import GdsTier
from tierstore.tiers.mmap import MmapTier
from tierstore.tiers.paged import PagedTier
from tierstore.tiers.pinned import PinnedTier
from tierstore.tiers.redis_records import RedisRecords
from tierstore.tiers.redis_tier import RedisTier
from tierstore.tiers.write_behind import WriteBehindTier

__all__ = [
    "DeviceTier",
    "FileTier",
    "GdsTier",
    "MmapTier",
    "PagedTier",
    "PinnedTier",
    "RedisRecords",
    "RedisTier",
    "WriteBehindTier",
]
