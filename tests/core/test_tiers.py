"""The shipped tiers pass the public suite; each has a few cases of its own."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.layout import BlockLayout
from tierstore.testing import TierTests
from tierstore.tiers import DeviceTier, MmapTier, PinnedTier, pinned

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierstore.interfaces import Ids, Tier

LAYOUT = BlockLayout.kv(4, 32, torch.float32)
BLOCK = LAYOUT.block_bytes
PAGE = os.sysconf("SC_PAGESIZE")


class TestDeviceTierOnTheCpu(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> DeviceTier:
        return DeviceTier(layout, limit_bytes, device="cpu")


@pytest.mark.gpu
class TestDeviceTierOnTheGpu(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> DeviceTier:
        return DeviceTier(layout, limit_bytes, device="cuda")


class TestPinnedTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> PinnedTier:
        return PinnedTier(layout, limit_bytes)


class TestMmapTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> MmapTier:
        return MmapTier(layout, folder / "blocks", limit_bytes)


def numbered(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def fill(tier: Tier, slots: int, value: int) -> None:
    tier.resize(slots)
    tier.write(numbered(slots), np.full((slots, BLOCK), value, np.uint8), numbered(slots)).wait()


@pytest.mark.parametrize("limit", ["64KiB", 1 << 16])
def test_a_limit_is_a_size_or_a_number_of_bytes(limit: str | int) -> None:
    assert PinnedTier(LAYOUT, limit).limit == (1 << 16) // BLOCK


@pytest.mark.parametrize("limit", [0, -1, "much", "3 parsecs", 1.5])
def test_a_limit_that_is_no_size_is_refused(limit: object) -> None:
    with pytest.raises(ConfigError, match="dram="):
        PinnedTier(LAYOUT, limit)  # type: ignore[arg-type]


def test_a_limit_beyond_what_the_machine_can_address_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"dram: .*: lower the limit"):
        PinnedTier(LAYOUT, 1 << 62)


def test_a_device_that_is_neither_cpu_nor_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="'meta'"):
        DeviceTier(LAYOUT, "1MiB", device="meta")


class Cudart:
    """A CUDA runtime that locks what it is told to, until `refuse_at` calls have been made."""

    def __init__(self, refuse_at: int = -1) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self._refuse_at = refuse_at

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes))
        if len(self.calls) - 1 == self._refuse_at:
            return 2
        self.locked[address] = nbytes
        return flags

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return {2: "out of memory"}[status]


@pytest.fixture
def errors_taken_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU is said to be there, and pages are locked 1 MiB at a time."""
    taken_up: list[str] = []
    monkeypatch.setattr(pinned, "_LOCKED_AT_ONCE", 1 << 20)
    monkeypatch.setattr(pinned, "forget_error", lambda: taken_up.append("error"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return taken_up


def test_no_more_is_locked_at_once_than_drivers_allow() -> None:
    assert 0 < pinned._LOCKED_AT_ONCE <= 64 << 30
    assert pinned._LOCKED_AT_ONCE % PAGE == 0


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (1 << 19, [1 << 19]),
        (1 << 20, [1 << 20]),
        ((1 << 20) + 1, [1 << 20, 1]),
        (5 << 19, [1 << 20, 1 << 20, 1 << 19]),
    ],
)
def test_pages_are_locked_piece_by_piece_without_gaps(
    errors_taken_up: list[str], monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    tier = PinnedTier(LAYOUT, limit)
    addresses, locked = zip(*cudart.calls, strict=True)
    assert list(locked) == sizes
    assert addresses[0] == tier.memory.slots.ctypes.data
    assert np.diff(addresses).tolist() == sizes[:-1]
    assert tier.is_pinned
    assert tier.medium == "page-locked memory"
    tier.close()
    assert cudart.locked == {}
    assert tier.medium == "ordinary memory"
    assert errors_taken_up == []
    tier.close()


@pytest.mark.parametrize("refuse_at", [0, 1, 2])
def test_when_a_piece_cannot_be_locked_none_is(
    errors_taken_up: list[str], monkeypatch: pytest.MonkeyPatch, refuse_at: int
) -> None:
    """Memory that is locked in part would be copied at two speeds and never given back."""
    cudart = Cudart(refuse_at)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    tier = PinnedTier(LAYOUT, 3 << 20)
    assert len(cudart.calls) == refuse_at + 1
    assert cudart.locked == {}
    assert not tier.is_pinned
    assert tier.medium == "ordinary memory (page-locking failed: out of memory)"
    assert errors_taken_up == ["error"]
    fill(tier, 2048, 7)
    tier.resize(8)
    tier.resize(2048)
    assert (tier.view[:8] == 7).all()
    assert not tier.view[8:].any(), "pages that are not locked return to the system"
    tier.close()


def test_pages_of_slots_that_went_return_to_the_system() -> None:
    """Pages that were only unmapped stay occupied, and come back with their old content."""
    tier = DeviceTier(LAYOUT, "1MiB")
    fill(tier, 512, 7)
    tier.resize(PAGE // BLOCK)
    tier.resize(512)
    assert (tier.view[: PAGE // BLOCK] == 7).all()
    assert not tier.view[PAGE // BLOCK :].any()


def test_closing_a_memory_tier_returns_its_slots() -> None:
    tier = DeviceTier(LAYOUT, "1MiB")
    fill(tier, 512, 7)
    tier.close()
    assert tier.memory.used_bytes == 0
    assert not tier.memory.slots.any()


def test_the_file_is_private_and_made_anew(tmp_path: Path) -> None:
    tier = MmapTier(LAYOUT, tmp_path / "blocks")
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o600
    tier.close()
    with pytest.raises(ConfigError, match=r"blocks' cannot be made \(File exists\)"):
        MmapTier(LAYOUT, tmp_path / "blocks")


@pytest.mark.parametrize("target", ["missing", "present"])
def test_the_file_is_never_behind_a_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "present").write_text("precious")
    (tmp_path / "blocks").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="File exists"):
        MmapTier(LAYOUT, tmp_path / "blocks")
    assert (tmp_path / "present").read_text() == "precious"
    assert not (tmp_path / "missing").exists()


def test_blocks_are_in_the_file(tmp_path: Path) -> None:
    tier = MmapTier(LAYOUT, tmp_path / "blocks")
    fill(tier, 3, 5)
    tier.sync()
    assert (tmp_path / "blocks").read_bytes()[: 3 * BLOCK] == b"\x05" * 3 * BLOCK
    assert tier.medium == "file"
    tier.close()
    assert (tmp_path / "blocks").read_bytes()[: 3 * BLOCK] == b"\x05" * 3 * BLOCK


def test_the_file_is_as_large_as_it_says_and_has_no_holes(tmp_path: Path) -> None:
    tier = MmapTier(LAYOUT, tmp_path / "blocks", "64KiB")
    for slots in (1, 9, 64, 10, 0, 3):
        tier.resize(slots)
        stats = (tmp_path / "blocks").stat()
        assert stats.st_size == tier.used_bytes == -(-slots * BLOCK // PAGE) * PAGE
        assert stats.st_blocks * 512 >= stats.st_size


def test_a_limit_covers_the_last_page_of_the_file(tmp_path: Path) -> None:
    """Five blocks of 1 KiB are 5 KiB, but a file of two pages."""
    tier = MmapTier(LAYOUT, tmp_path / "blocks", 5 * BLOCK)
    assert tier.limit == 4
    with pytest.raises(CapacityError, match=r"5 blocks take 8\.0 KiB, over the limit of 5\.0 KiB"):
        tier.resize(5)
    tier.resize(4)
    assert (tmp_path / "blocks").stat().st_size == 4 * BLOCK


def test_without_a_limit_free_space_is_the_limit(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    limit = MmapTier(LAYOUT, tmp_path / "blocks").limit * BLOCK
    assert limit == pytest.approx(stats.f_bavail * stats.f_frsize, rel=0.05)


def test_a_full_disk_refuses_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while space is being reserved: half of it is there when the error comes."""
    tier = MmapTier(LAYOUT, tmp_path / "blocks")
    fill(tier, 8, 3)

    def fill_up(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, (offset + length) // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(CapacityError, match=r"no 1\.0 MiB in .*No space left on device"):
        tier.resize(1024)
    assert tier.capacity == 8
    assert (tmp_path / "blocks").stat().st_size == tier.used_bytes == 8 * BLOCK
    assert (tier.view == 3).all()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where the user may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tierstore-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)


def test_a_really_full_disk_refuses_and_changes_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as folder:
        tier = MmapTier(LAYOUT, folder / "blocks")
        assert tier.limit <= 256
        fill(tier, 8, 3)
        with pytest.raises(CapacityError, match="No space left on device"):
            tier.resize(1024)
        assert tier.capacity == 8
        assert (tier.view == 3).all()
        fill(tier, tier.limit, 4)
        tier.resize(8)
        (folder / "other").write_bytes(bytes(200 << 10))
        assert tier.limit < 64
        tier.close()


@pytest.mark.parametrize("slots", [16, 4])
def test_a_file_that_something_cut_is_noticed_before_it_is_mapped(
    tmp_path: Path, slots: int
) -> None:
    """Mapped memory without a file behind it would kill the process when touched."""
    tier = MmapTier(LAYOUT, tmp_path / "blocks")
    tier.resize(8)
    os.truncate(tmp_path / "blocks", PAGE)
    with pytest.raises(TierOfflineError, match="something else changed it"):
        tier.resize(slots)
