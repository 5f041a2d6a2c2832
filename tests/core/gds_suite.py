"""What `GdsTier` must do; `test_gds.py` runs this in a process of its own.

KvikIO works only where there is a CUDA driver, and a stand-in for one must be there before the
process starts.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.layout import BlockLayout, Part
from tierstore.testing import TierTests
from tierstore.tiers import GdsTier

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Bytes, Ids

PAGE = 4096
SMALL = BlockLayout.kv(4, 32, torch.float32)
WHOLE = BlockLayout.kv(16, 64, torch.float32)
"""Of two pages exactly, one for each part."""
RAGGED = BlockLayout(
    (
        Part("k", (3, 1000), torch.float32),
        Part("scale", (3, 1), torch.float32),
        Part("v", (3, 1700), torch.float32),
    )
)
"""Parts end inside pages, and a page may hold bytes of three."""


class TestGdsTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> GdsTier:
        return GdsTier(layout, folder / "blocks", limit_bytes)


class TestGdsTierWithOneBuffer(TierTests):
    """What does not fit into its staging is done in turn."""

    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> GdsTier:
        return GdsTier(
            layout, folder / "blocks", limit_bytes, depth=1, threads=2, task_bytes="4KiB"
        )


def numbered(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def random_blocks(layout: BlockLayout, n: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, layout.block_bytes), np.uint8)


def filled(layout: BlockLayout, path: Path, slots: int, depth: int = 32) -> tuple[GdsTier, Bytes]:
    tier = GdsTier(layout, path, depth=depth)
    tier.resize(slots)
    blocks = random_blocks(layout, slots)
    tier.write(numbered(slots), blocks, numbered(slots)).wait()
    return tier, blocks


def content(tier: GdsTier) -> Bytes:
    out: Bytes = np.zeros((tier.capacity, tier.layout.block_bytes), np.uint8)
    tier.read(numbered(tier.capacity), out, numbered(tier.capacity)).wait()
    return out


@pytest.mark.parametrize("layout", [SMALL, WHOLE, RAGGED], ids=["small", "whole", "ragged"])
def test_every_slot_begins_at_a_page(tmp_path: Path, layout: BlockLayout) -> None:
    tier, blocks = filled(layout, tmp_path / "blocks", 40)
    tier.sync()
    stride = -(-layout.block_bytes // PAGE) * PAGE
    stored = np.fromfile(tmp_path / "blocks", np.uint8).reshape(40, stride)
    assert np.array_equal(stored[:, : layout.block_bytes], blocks)
    assert tier.used_bytes == 40 * stride
    tier.close()


@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("layout", [WHOLE, RAGGED], ids=["whole", "ragged"])
@settings(max_examples=30)
@given(data=st.data())
def test_parts_of_several_pages_keep_to_themselves(
    tmp_path_factory: pytest.TempPathFactory,
    layout: BlockLayout,
    depth: int,
    data: st.DataObject,
) -> None:
    tier, model = filled(layout, tmp_path_factory.mktemp("gds") / "blocks", 30, depth=depth)
    names = [part.name for part in layout.parts]
    for seed in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.lists(st.integers(0, 29), unique=True))
        parts = data.draw(st.none() | st.lists(st.sampled_from(names), unique=True))
        new = random_blocks(layout, 30, seed + 1)
        rows = np.random.default_rng(seed).permutation(30).astype(np.int32)[: len(slots)]
        tier.write(np.array(slots, np.int32), new, rows, parts).wait()
        for name in names if parts is None else parts:
            start = layout.offset(name)
            stop = start + layout.part(name).nbytes
            model[slots, start:stop] = new[rows, start:stop]
        assert np.array_equal(content(tier), model)
    for name in names:
        out, start = np.zeros_like(model), layout.offset(name)
        expected = out.copy()
        stop = start + layout.part(name).nbytes
        expected[:, start:stop] = model[::-1, start:stop]
        tier.read(numbered(30)[::-1], out, numbered(30), [name]).wait()
        assert np.array_equal(out, expected)
    tier.close()


@pytest.mark.parametrize("layout", [SMALL, WHOLE, RAGGED], ids=["small", "whole", "ragged"])
def test_many_transfers_are_under_way_at_once(tmp_path: Path, layout: BlockLayout) -> None:
    """A thousand reads, far more than there is staging for, before the first is waited for."""
    tier, blocks = filled(layout, tmp_path / "blocks", 64, depth=4)
    outs = [np.zeros((3, layout.block_bytes), np.uint8) for _ in range(1000)]
    slots = [np.array([i % 64, (i * 7 + 1) % 64, 5], np.int32) for i in range(1000)]
    under_way = [tier.read(s, out, numbered(3)) for s, out in zip(slots, outs, strict=True)]
    for read in under_way:
        read.wait()
    assert all(np.array_equal(out, blocks[s]) for s, out in zip(slots, outs, strict=True))
    tier.close()


def test_memory_that_begins_anywhere_is_served(tmp_path: Path) -> None:
    tier, _ = filled(WHOLE, tmp_path / "blocks", 8)
    blocks = random_blocks(WHOLE, 8, seed=1)
    shifted = np.zeros(blocks.nbytes + 3, np.uint8)[3:].reshape(blocks.shape)
    shifted[:] = blocks
    tier.write(numbered(8), shifted, numbered(8)).wait()
    out = np.zeros(blocks.nbytes + 1, np.uint8)[1:].reshape(blocks.shape)
    tier.read(numbered(8), out, numbered(8)).wait()
    assert np.array_equal(out, blocks)
    wide = np.zeros((8, 2 * WHOLE.block_bytes), np.uint8)[:, : WHOLE.block_bytes]
    tier.read(numbered(8), wide, numbered(8)).wait()
    assert np.array_equal(wide, blocks)
    tier.close()


def test_the_medium_is_what_the_machine_has(tmp_path: Path) -> None:
    import kvikio.defaults

    tier = GdsTier(SMALL, tmp_path / "blocks")
    if kvikio.defaults.is_compat_mode_preferred():
        assert tier.medium.startswith("file (KvikIO in POSIX mode, ")
    else:
        assert tier.medium.startswith("file (KvikIO, ")
    tier.close()


def test_settings_reach_kvikio(tmp_path: Path) -> None:
    import kvikio.defaults

    tier = GdsTier(SMALL, tmp_path / "blocks", threads=3, task_bytes="64KiB")
    assert kvikio.defaults.get("num_threads") == 3
    assert kvikio.defaults.get("task_size") == 64 << 10
    assert kvikio.defaults.get("auto_direct_io_read")
    tier.close()


@pytest.mark.parametrize("options", [{"threads": 0}, {"depth": 0}, {"task_bytes": 0}])
def test_settings_that_are_none_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GdsTier(SMALL, tmp_path / "blocks", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "blocks").exists()


def test_the_file_is_private_made_anew_and_behind_no_link(tmp_path: Path) -> None:
    tier = GdsTier(SMALL, tmp_path / "blocks")
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "blocks").stat().st_size == 0
    tier.close()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name in ("blocks", "link"):
        with pytest.raises(ConfigError, match=r"cannot be made \(File exists\)"):
            GdsTier(SMALL, tmp_path / name)


def test_a_file_that_takes_the_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier works on the file that it made, whatever has its name when KvikIO opens it."""
    import kvikio

    open_file = kvikio.CuFile

    def too_late(path: str, flags: str) -> object:
        (tmp_path / "blocks").rename(tmp_path / "moved")
        (tmp_path / "blocks").write_text("precious")
        return open_file(path, flags)

    monkeypatch.setattr(kvikio, "CuFile", too_late)
    tier, blocks = filled(SMALL, tmp_path / "blocks", 8)
    assert np.array_equal(content(tier), blocks)
    assert (tmp_path / "blocks").read_text() == "precious"
    tier.close()


def test_a_full_disk_refuses_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, blocks = filled(SMALL, tmp_path / "blocks", 8)

    def fill_up(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, (offset + length) // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(CapacityError, match="No space left on device"):
        tier.resize(1024)
    assert (tier.capacity, tier.used_bytes) == (8, 8 * PAGE)
    assert np.array_equal(content(tier), blocks)
    tier.close()


@pytest.mark.parametrize("layout", [SMALL, WHOLE], ids=["small", "whole"])
def test_a_file_that_something_cut_is_an_error(tmp_path: Path, layout: BlockLayout) -> None:
    tier, _ = filled(layout, tmp_path / "blocks", 8)
    os.truncate(tmp_path / "blocks", PAGE)
    with pytest.raises(TierOfflineError, match="something else cut it"):
        content(tier)
    with pytest.raises(TierOfflineError, match="something else changed it"):
        tier.resize(16)
    tier.close()


class Failing:
    """KvikIO's file; request number `bad` fails with that text, at once or when waited for."""

    def __init__(self, handle: object, text: str, bad: int, *, at_once: bool) -> None:
        self._handle, self._text, self._bad, self._at_once = handle, text, bad, at_once
        self.begun = self.over = 0

    def _move(self, name: str, *request: object) -> Failing.Future:
        is_bad = self.begun == self._bad
        if is_bad and self._at_once:
            self._bad = -1
            raise RuntimeError(self._text)
        self.begun += 1
        if is_bad:
            return self.Future(self, None, self._text)
        return self.Future(self, getattr(self._handle, name)(*request), "")

    def pread(self, *request: object) -> Failing.Future:
        return self._move("pread", *request)

    def pwrite(self, *request: object) -> Failing.Future:
        return self._move("pwrite", *request)

    def close(self) -> None:
        self._handle.close()  # type: ignore[attr-defined]

    class Future:
        def __init__(self, file: Failing, future: object, text: str) -> None:
            self._file, self._future, self._text = file, future, text

        def get(self) -> int:
            self._file.over += 1
            if self._text:
                raise RuntimeError(self._text)
            return int(self._future.get())  # type: ignore[attr-defined]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("layout", [SMALL, WHOLE, RAGGED], ids=["small", "whole", "ragged"])
@pytest.mark.parametrize("operation", ["read", "write", "write parts"])
@pytest.mark.parametrize("bad", [0, 3])
def test_after_an_error_nothing_is_under_way(
    tmp_path: Path, layout: BlockLayout, depth: int, operation: str, bad: int, *, at_once: bool
) -> None:
    """And the tier serves on: no staging buffer is lost."""
    tier, blocks = filled(layout, tmp_path / "blocks", 120, depth=depth)
    slots = numbered(120)[::-2]
    moves = {
        "read": lambda: tier.read(slots, blocks.copy(), slots).wait(),
        "write": lambda: tier.write(slots, blocks, slots).wait(),
        "write parts": lambda: tier.write(slots, blocks, slots, ["k"]).wait(),
    }
    text = "POSIX error on pwrite: No space left on device"
    real = tier._handle  # KvikIO offers no place for a fault
    tier._handle = file = Failing(real, text, bad, at_once=at_once)
    with pytest.raises(OSError, match="No space left on device") as failed:
        moves[operation]()
    assert failed.value.errno == errno.ENOSPC
    assert file.over == file.begun >= bad
    tier._handle = real
    tier.write(numbered(120), blocks, numbered(120)).wait()
    assert np.array_equal(content(tier), blocks)
    free = [len(buffers) for buffers in tier._pool._free.values()]
    assert free == list(tier._pool._made.values())
    tier.close()


@pytest.mark.parametrize("layout", [SMALL, RAGGED], ids=["small", "ragged"])
def test_neighbours_are_one_request(tmp_path: Path, layout: BlockLayout) -> None:
    tier, blocks = filled(layout, tmp_path / "blocks", 8)
    tier._handle = file = Failing(tier._handle, "", -1, at_once=False)
    slots, out = np.array([3, 7, 2, 6, 5, 4], np.int32), np.zeros_like(blocks)
    tier.read(slots, out, slots).wait()
    assert np.array_equal(out[2:], blocks[2:])
    assert file.begun == 1
    tier.close()


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    def open_and_close(name: str) -> None:
        filled(SMALL, tmp_path / name, 4)[0].close()

    open_and_close("first")
    before = len(os.listdir("/proc/self/fd"))
    for i in range(30):
        open_and_close(f"{i}")
        with pytest.raises(ConfigError):
            GdsTier(SMALL, tmp_path / f"{i}")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [SMALL, WHOLE, RAGGED], ids=["small", "whole", "ragged"])
def test_blocks_move_to_and_from_gpu_memory(tmp_path: Path, layout: BlockLayout) -> None:
    cupy = pytest.importorskip("cupy")
    tier, blocks = filled(layout, tmp_path / "blocks", 40)
    out = cupy.zeros(blocks.shape, np.uint8)
    tier.read(numbered(40)[::-1], out, numbered(40)).wait()
    assert np.array_equal(cupy.asnumpy(out), blocks[::-1])
    tier.write(numbered(40), out, numbered(40)).wait()
    assert np.array_equal(content(tier), blocks[::-1])
    tier.write(numbered(40), cupy.asarray(blocks), numbered(40), ["k"]).wait()
    part = layout.part("k").nbytes
    assert np.array_equal(content(tier)[:, :part], blocks[:, :part])
    tier.close()
