"""The roofline: what a processor can attain on data that come from here or there.

S. Williams et al., Roofline (CACM 2009), as KVDrive draws it: attention over critical blocks, of
which some are in the fast tier and the rest comes over the link, against the host over its own
memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.hardware import Hardware

HITS = (0.0, 0.8, 0.9)
"""Shares of the blocks in the fast tier that a figure shows."""


@dataclass(frozen=True)
class Roof:
    """The most FLOP/s at any intensity, in FLOP for each byte that is attended to.

    Attributes
    ----------
    flops: FLOP/s of the processor. bandwidth: bytes/s at which data reach it.
    """

    name: str
    flops: float
    bandwidth: float

    def attainable(self, intensity: float) -> float:
        """FLOP/s at so many FLOP per byte."""
        return min(self.flops, intensity * self.bandwidth)

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the processor is the limit."""
        return self.flops / self.bandwidth


def device_roof(hardware: Hardware, hits: float) -> Roof:
    """The device, with a share `hits` of what it attends to in its memory already.

    Misses come over the link while hits are read, so that the slower of the two counts.
    """
    memory = hardware.device.memory
    link = math.inf if hits >= 1 else hardware.link / (1 - hits)
    return Roof(f"device, {hits:.0%} hits", hardware.device.vector, min(memory, link))


def disk_roof(hardware: Hardware, read_bytes: int) -> Roof:
    """The device over data that come from disk in reads of one size."""
    rate = min(hardware.disk_rate(read_bytes), hardware.device.memory)
    return Roof(f"device from disk, reads of {read_bytes >> 10} KiB", hardware.device.vector, rate)


def host_roof(hardware: Hardware) -> Roof:
    """The host over its own memory."""
    return Roof("host in place", hardware.host.vector, hardware.host.memory)


def roofs(hardware: Hardware, hits: Sequence[float] = HITS) -> list[Roof]:
    """The roofs of a figure: device by hits and from its memory, host in place, disk."""
    device = [device_roof(hardware, share) for share in (*hits, 1.0)]
    return [*device, host_roof(hardware), disk_roof(hardware, 64 << 10)]


def crossing(hardware: Hardware, hits: float = 0.0) -> float:
    """Intensity P below which the host in place attains more than the device; FLOP per byte.

    0 where the device never attains less, infinite where it never attains more.
    """
    device, host = device_roof(hardware, hits), host_roof(hardware)
    if device.bandwidth >= host.bandwidth:
        return 0.0 if device.flops >= host.flops else math.inf
    return host.flops / device.bandwidth if device.flops >= host.flops else math.inf
