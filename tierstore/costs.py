"""Where to work on blocks that are not in the fast tier: bring them there, or go to them.

A block that is fetched costs the link once and is then used from the fast tier until it leaves; one
that stays costs the slower processor at each use. What decides is how often a block is used while
it is resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tierstore.hardware import Hardware
    from tierstore.interfaces import Pointers

Flags = npt.NDArray[np.bool_]
Amounts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlaceCosts:
    """Seconds of the two ways.

    Attributes
    ----------
    move: to bring a block into the fast tier. near: to use it there. far: to use it where it lies.
    fetch_call: for bringing any blocks at all in a step. far_call: for using any where they lie.
    """

    move: float
    near: float
    far: float
    fetch_call: float
    far_call: float

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        block_bytes: int,
        block_flops: float,
        *,
        uses_all_near: bool = False,
    ) -> PlaceCosts:
        """For blocks of so many bytes, on which a use does so many operations.

        uses_all_near: everything in the fast tier is used at each step, whichever blocks it are, so
            that one more use there costs nothing.
        """
        device, host = hardware.device, hardware.host
        near = max(block_bytes / device.memory, block_flops / device.vector)
        return cls(
            move=block_bytes / hardware.link + hardware.admit,
            near=0.0 if uses_all_near else near,
            far=max(block_bytes / host.memory, block_flops / host.vector),
            fetch_call=device.launch,
            far_call=host.launch,
        )

    def total(self, misses: Pointers, uses: Amounts, stays: Flags) -> float:
        """Seconds of a choice.

        misses, uses, stays: [R], blocks of each row that are not in the fast tier, how often a
        block is used while it is resident, and whether the row's blocks stay where they are.
        """
        fetched, far = misses * ~stays, misses * stays
        seconds = (fetched * (self.move + uses * self.near) + far * uses * self.far).sum()
        calls = self.fetch_call * fetched.any() + self.far_call * far.any()
        return float(seconds + calls)

    def stays(self, misses: Pointers, uses: Amounts) -> Flags:
        """The choice of least `total`: for each row whether its blocks are used where they lie.

        Exact: either one of the two calls is saved, and all rows go one way, or each row goes its
        own better way.
        """
        own: Flags = uses * self.far < self.move + uses * self.near
        everything, nothing = np.ones_like(own), np.zeros_like(own)
        choices = (own, everything, nothing)
        return min(choices, key=lambda choice: self.total(misses, uses, choice))
