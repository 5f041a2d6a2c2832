"""The tier chain of one engine: which tiers there are, and what each limit is divided into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from tierstore.codecs import make_codec
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.tiers import DeviceTier, FileTier, MmapTier, PinnedTier

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout

TierFactory = Callable[["BlockLayout"], "Sequence[Tier]"]
"""Makes the tiers of a stack, fastest first, for a block layout."""


class TierSizes(NamedTuple):
    """The usual tiers as `SparseAttention` is asked for them; None for none."""

    fast: str | int | None
    dram: str | int | None
    disk: str | Path | None
    disk_codec: str | None
    keep: bool


class TierStack:
    """Tiers, fastest first, and the private directory behind the disk tier if there is one."""

    def __init__(self, tiers: Sequence[Tier], directory: PrivateDirectory | None = None) -> None:
        self.tiers: tuple[Tier, ...] = tuple(tiers)
        self._directory = directory

    @classmethod
    def of_sizes(cls, sizes: TierSizes, layout: BlockLayout, device: torch.device) -> TierStack:
        """The tiers that `fast`, `dram` and `disk` ask for; with a `disk_codec`, disk is coded.

        ConfigError if there is no memory tier, if the model computes on a GPU and none is fast, or
        if what is said of the disk has no disk.
        """
        fast, dram, disk, disk_codec, keep = sizes
        if (keep or disk_codec is not None) and disk is None:
            raise ConfigError(
                f"keep={keep}, disk_codec={disk_codec!r}: there is no disk tier: pass disk="
            )
        if fast is None and dram is None:
            raise ConfigError(
                "no memory tier: expected fast=, dram= or both, for example dram='1GiB' "
                "(and disk='kv/' to hold more)"
            )
        if fast is None and device.type != "cpu":
            raise ConfigError(
                f"the model is on {device}: expected fast='...', the limit of device memory"
            )
        codec = None if disk_codec is None else make_codec(disk_codec, layout)
        directory = None if disk is None else PrivateDirectory(disk, keep=keep)
        stack = cls([], directory)
        with ExitStack() as on_error:
            on_error.callback(stack.close)
            if fast is not None:
                stack.tiers += (DeviceTier(layout, fast, device=device),)
            if dram is not None:
                stack.tiers += (PinnedTier(layout, dram),)
            if directory is not None:
                blocks = directory.path / "blocks"
                if codec is None:
                    stack.tiers += (MmapTier(layout, blocks),)
                else:
                    stack.tiers += (FileTier(layout, blocks, codec=codec),)
            on_error.pop_all()
        return stack

    def clear(self) -> None:
        """Empty every tier."""
        for tier in self.tiers:
            tier.resize(0)
            if tier.memory is not None:
                tier.memory.clear()

    def close(self) -> None:
        """Close the tiers and remove their directory."""
        for tier in self.tiers:
            tier.close()
        if self._directory is not None:
            self._directory.close()


def stack_for(
    tiers: TierFactory | None, sizes: TierSizes, layout: BlockLayout, device: torch.device
) -> TierStack:
    """The stack that a caller makes with `tiers`, or the usual one; ConfigError for both."""
    if tiers is None:
        return TierStack.of_sizes(sizes, layout, device)
    if sizes != TierSizes(None, None, None, None, keep=False):
        raise ConfigError(
            "tiers= replaces fast=, dram=, disk=, disk_codec= and keep=: give one or the other"
        )
    return TierStack(tiers(layout))
