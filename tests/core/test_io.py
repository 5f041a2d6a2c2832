"""The seam between durable files and the operating system."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from tierstore.errors import TierOfflineError
from tierstore.io import FileIO, read_fully, write_fully

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer, WriteableBuffer


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = FileIO().open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


class Interrupted(FileIO):
    """Moves one byte at a time, and is interrupted every other time."""

    def __init__(self) -> None:
        self.errors = iter([InterruptedError(), None, BlockingIOError(), None] * 100)

    def interrupt(self) -> None:
        if error := next(self.errors):
            raise error

    def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
        self.interrupt()
        return super().read(fd, memoryview(buffer)[:1], offset)

    def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
        self.interrupt()
        return super().write(fd, [memoryview(buffers[0])[:1]], offset)


class Stuck(FileIO):
    """Moves nothing, and says so."""

    def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
        return 0


def test_files_and_directories_are_private_and_not_inherited(tmp_path: Path) -> None:
    io, path = FileIO(), tmp_path / "folder"
    before = os.umask(0)
    try:
        io.make_directory(str(path))
        fd = io.open(str(path / "file"), os.O_RDWR | os.O_CREAT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "file").stat().st_mode) == 0o600
    assert not os.get_inheritable(fd)
    io.close(fd)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic links") as caught:
        FileIO().open(str(tmp_path / "link"), os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError, match=r"directory|symbolic"):
        FileIO().sync_directory(str(tmp_path / "folder"))


def test_bytes_come_back_from_where_they_were_put(fd: int) -> None:
    io = FileIO()
    assert io.write(fd, [b"ab", b"", b"cde"], 3) == 5
    first, second = bytearray(4), bytearray(2)
    assert io.read_into(fd, [first, second], 2) == 6
    assert first + second == b"\0abcde"
    assert io.read(fd, first, 8) == 0


def test_space_is_reserved_and_cut(fd: int) -> None:
    io = FileIO()
    io.allocate(fd, 0, 1 << 20)
    assert io.size(fd) == 1 << 20
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    io.truncate(fd, 10)
    assert io.size(fd) == 10


def test_syncs_reach_the_system(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would show it before a power loss."""
    synced: list[tuple[int, int]] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: synced.append((fd, os.fstat(fd).st_ino)))
    FileIO().sync(fd)
    assert synced == [(fd, os.fstat(fd).st_ino)]
    FileIO().sync_directory(str(tmp_path))
    assert synced[1][1] == tmp_path.stat().st_ino


def test_names_are_listed_replaced_and_removed(tmp_path: Path) -> None:
    io = FileIO()
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    io.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    assert io.list(str(tmp_path)) == ["b"]
    assert (tmp_path / "b").read_bytes() == b"a"
    io.sync_directory(str(tmp_path))
    io.remove(str(tmp_path / "b"))
    assert io.list(str(tmp_path)) == []
    assert io.free_bytes(str(tmp_path)) > 0


def test_interruptions_and_short_transfers_are_gone_on_with(fd: int) -> None:
    write_fully(Interrupted(), fd, [b"abc", b"", b"def"], 2)
    out = bytearray(6)
    read_fully(Interrupted(), fd, out, 2)
    assert out == b"abcdef"
    assert FileIO().size(fd) == 8


def test_more_buffers_than_one_call_takes_are_written(fd: int) -> None:
    pieces = [bytes([number % 251]) * 3 for number in range(3000)]
    write_fully(FileIO(), fd, pieces, 0)
    out = bytearray(9000)
    read_fully(FileIO(), fd, out, 0)
    assert out == b"".join(pieces)


def test_a_file_that_ends_too_soon_cannot_be_read_whole(fd: int) -> None:
    write_fully(FileIO(), fd, [b"abc"], 0)
    with pytest.raises(TierOfflineError, match="the file ends at 3: 2 more bytes were expected"):
        read_fully(FileIO(), fd, bytearray(4), 1)


def test_a_write_without_progress_is_an_error(fd: int) -> None:
    with pytest.raises(OSError, match="nothing could be written at 5") as caught:
        write_fully(Stuck(), fd, [b"abc"], 5)
    assert caught.value.errno == errno.EIO


def test_nothing_is_read_or_written_without_a_call(fd: int) -> None:
    read_fully(Stuck(), fd, bytearray(), 0)
    write_fully(Stuck(), fd, [b"", b""], 0)


def test_a_full_disk_is_an_error() -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            write_fully(FileIO(), fd, [b"abc"], 0)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.ENOSPC
