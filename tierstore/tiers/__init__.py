"""The places where blocks can be."""

from tierstore.tiers.device import DeviceTier
from tierstore.tiers.mmap import MmapTier
from tierstore.tiers.pinned import PinnedTier

__all__ = ["DeviceTier", "MmapTier", "PinnedTier"]
