"""The durable tier: records under keys in segment files."""

from tierstore.volume.check import Finding
from tierstore.volume.sealing import Stored
from tierstore.volume.volume import Volume

__all__ = ["Finding", "Stored", "Volume"]
