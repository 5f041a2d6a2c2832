"""The tier chain of one engine: which tiers there are, and what each limit is divided into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tierstore.codecs import make_codec
from tierstore.cuda import CudaCopies
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.memory import Memory
from tierstore.sizes import parse_size
from tierstore.staging import Staging
from tierstore.tiers import DeviceTier, FileTier, MmapTier, PagedTier, PinnedTier, WriteBehindTier
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tierstore.adapters.attention.sync import SyncLevel
    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout

_MOST_WAITING = 16 << 20
_SHARE_WAITING = 32
"""Writes that wait for the disk take 1/32 of DRAM, and 16 MiB at most."""

_DIRECT_EXTENT = 1 << 12

TierFactory = Callable[["BlockLayout"], "Sequence[Tier]"]
"""Makes the tiers of a stack, fastest first, for a block layout."""


class TierSizes(NamedTuple):
    """The usual tiers as `SparseAttention` is asked for them; None for none."""

    fast: str | int | None
    dram: str | int | None
    disk: str | Path | None
    disk_codec: str | None
    keep: bool
    sync: SyncLevel | None = None


class TierStack:
    """Tiers, fastest first, and the private directory behind the disk tier if there is one."""

    def __init__(self, tiers: Sequence[Tier], directory: PrivateDirectory | None = None) -> None:
        self.tiers: tuple[Tier, ...] = tuple(tiers)
        self._directory = directory

    @classmethod
    def of_sizes(cls, sizes: TierSizes, layout: BlockLayout, device: torch.device) -> TierStack:
        """The tiers that `fast`, `dram` and `disk` ask for; with a `disk_codec`, disk is coded.

        ConfigError if there is no memory tier, if the model computes on a GPU and none is fast, or
        if what is said of the disk has no disk. With a sync level there are three tiers.
        """
        fast, dram, disk, disk_codec, keep, sync = sizes
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
        if sync is not None and (fast is None or dram is None or disk is None or disk_codec):
            raise ConfigError(
                f"sync level {sync.name}: expected fast=, dram= and disk=, and no disk_codec="
            )
        codec = None if disk_codec is None else make_codec(disk_codec, layout)
        directory = None if disk is None else PrivateDirectory(disk, keep=keep)
        stack = cls([], directory)
        with ExitStack() as on_error:
            on_error.callback(stack.close)
            if fast is not None:
                stack.tiers += (DeviceTier(layout, fast, device=device),)
            has_pages = sync is not None and not sync.is_direct
            host = None if dram is None else _host_tier(layout, dram, has_pages=has_pages)
            if host is not None:
                stack.tiers += (host,)
            if directory is not None:
                blocks = directory.path / "blocks"
                behind: Tier
                if has_pages and host is not None:
                    behind = PagedTier(layout, blocks, host.memory.limit_bytes)
                    host.memory.lend(partial(setattr, behind, "cache_bytes"))
                    if device.type != "cpu":
                        staging = Staging(layout, host.memory, CudaCopies(device))
                        host.staging = behind.staging = staging
                elif sync is not None:
                    behind = FileTier(layout, blocks, extent_bytes=_DIRECT_EXTENT)
                elif codec is None:
                    behind = MmapTier(layout, blocks)
                else:
                    behind = FileTier(layout, blocks, codec=codec)
                stack.tiers += (written_behind(behind, stack.tiers),)
            on_error.pop_all()
        return stack

    def clear(self) -> None:
        """Empty every tier, the last first: what waits for it lies in the memory of another."""
        for tier in reversed(self.tiers):
            tier.resize(0)
            if tier.memory is not None:
                tier.memory.clear()

    def close(self) -> None:
        """Close the tiers and remove their directory, or what is to stay is on disk."""
        with ExitStack() as closing:
            if self._directory is not None:
                closing.callback(self._directory.close)
            for tier in self.tiers:
                closing.callback(tier.close)
            if self._directory is not None and self._directory.is_kept and self.tiers:
                self.tiers[-1].sync()


def stack_for(
    tiers: TierFactory | None, sizes: TierSizes, layout: BlockLayout, device: torch.device
) -> TierStack:
    """The stack that a caller makes with `tiers`, or the usual one; ConfigError for both."""
    if tiers is None:
        return TierStack.of_sizes(sizes, layout, device)
    if sizes != TierSizes(None, None, None, None, keep=False):
        raise ConfigError(
            "tiers= replaces fast=, dram=, disk=, disk_codec=, keep= and sync=: give one or the "
            "other"
        )
    return TierStack(tiers(layout))


def _host_tier(layout: BlockLayout, dram: str | int, *, has_pages: bool) -> MemoryTier:
    """DRAM, its pages locked unless the page cache has its part of the limit.

    Locked pages are there whether slots fill them or not: the cache would take them again.
    """
    if has_pages:
        return MemoryTier(layout, Memory(parse_size(dram, "dram"), "dram"), "dram")
    return PinnedTier(layout, dram)


def written_behind(disk: Tier, above: Sequence[Tier]) -> Tier:
    """The disk tier with a buffer in the host memory above it, if that is large enough for one."""
    memories = [tier.memory for tier in above if tier.memory is not None]
    host: list[Memory] = [memory for memory in memories if memory.is_host]
    if not host:
        return disk
    buffer = min(_MOST_WAITING, host[-1].limit_bytes // _SHARE_WAITING)
    if buffer < 2 * disk.layout.block_bytes:
        return disk
    return WriteBehindTier(disk, host[-1], buffer)
