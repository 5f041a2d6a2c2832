"""Faults do what they say, and a power loss takes what was not synced and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import ConfigError
from tierstore.io import DIRECT, FileIO, read_fully, write_fully
from tierstore.testing import FakeClock, FaultIO, KillIO
from tierstore.testing.faults import (
    KINDS,
    damaged,
    delayed,
    error,
    hanging,
    misdirected,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.testing.faults import Call, Effect
    from tierstore.testing.powerloss import Keep

PAGE = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def create(io: FaultIO, path: Path, content: bytes = b"") -> int:
    """A file whose name and content are durable."""
    fd = io.open(str(path), os.O_RDWR | os.O_CREAT)
    if content:
        write_fully(io, fd, [content], 0)
    io.sync(fd)
    io.sync_directory(str(path.parent))
    return fd


def after_crash(
    io: FaultIO,
    folder: Path,
    keep: Keep = "none",
    *,
    tear: int | None = None,
    seed: int = 0,
) -> dict[str, bytes]:
    """The files that are left, by path."""
    into = folder / f"crash-{len(list(folder.iterdir()))}"
    io.crash(into, keep=keep, tear=tear, seed=seed)
    found = sorted(path for path in into.rglob("*") if path.is_file())
    return {str(path.relative_to(into)): path.read_bytes() for path in found}


# Effects


def test_an_error_is_raised_and_nothing_is_done(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"before")
    io.inject("write", error(errno.ENOSPC))
    with pytest.raises(OSError, match="injected into write") as caught:
        io.write(fd, [b"after!"], 0)
    assert caught.value.errno == errno.ENOSPC
    assert (root / "a").read_bytes() == b"before"


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_every_kind_of_call_can_fail(root: Path, kind: str) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"content")
    path = str(root / "a")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: io.open(path, os.O_RDONLY),
        "close": lambda: io.close(fd),
        "read": lambda: io.read(fd, bytearray(2), 0),
        "write": lambda: io.write(fd, [b"xy"], 0),
        "sync": lambda: io.sync(fd),
        "sync_directory": lambda: io.sync_directory(str(root)),
        "allocate": lambda: io.allocate(fd, 0, 100),
        "truncate": lambda: io.truncate(fd, 1),
        "size": lambda: io.size(fd),
        "free_bytes": lambda: io.free_bytes(str(root)),
        "list": lambda: io.list(str(root)),
        "make_directory": lambda: io.make_directory(str(root / "folder")),
        "rename": lambda: io.rename(path, path + "2"),
        "remove": lambda: io.remove(path),
        "reached": lambda: io.reached("somewhere"),
    }
    fault = io.inject(kind, error(errno.EIO))
    with pytest.raises(OSError, match=f"injected into {kind}"):
        calls[kind]()
    assert fault.hits == 1
    assert sorted(os.listdir(root)) == ["a"]
    assert (root / "a").read_bytes() == b"content"


def test_every_method_of_the_seam_is_a_kind() -> None:
    methods = {name for name in vars(FileIO) if not name.startswith("_")}
    assert methods - {"read_into", "read_many", "reads_many"} == set(KINDS)
    assert methods <= set(vars(FaultIO)), "a call that is not overridden cannot fail"


def test_a_close_that_fails_closes_all_the_same(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a")
    io.inject("close", error(errno.EIO))
    with pytest.raises(OSError, match="injected"):
        io.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_short_transfer_moves_so_many_bytes(root: Path) -> None:
    io, out = FaultIO(root), bytearray(8)
    fd = create(io, root / "a", b"01234567")
    io.inject("read write", short(3))
    assert io.read(fd, out, 2) == 3
    assert out == b"234\0\0\0\0\0"
    assert io.write(fd, [b"ab", b"cdef"], 0) == 3
    assert (root / "a").read_bytes() == b"abc34567"
    assert io.read_into(fd, [bytearray(2), last := bytearray(2)], 0) == 3
    assert last == b"c\0"


def test_loops_survive_short_transfers_and_notice_no_progress(root: Path) -> None:
    io, out = FaultIO(root), bytearray(8)
    fd = create(io, root / "a", b"01234567")
    fault = io.inject("*", short(3))
    read_fully(io, fd, out, 0)
    assert out == b"01234567"
    assert fault.hits == 3
    io.heal()
    io.inject("write", short(0), nth=2)
    io.inject("write", short(3))
    with pytest.raises(OSError, match="nothing could be written at 3"):
        write_fully(io, fd, [b"abcdefgh"], 0)


def test_damage_flips_a_byte_read_but_not_the_file(root: Path) -> None:
    io, first, second = FaultIO(root), bytearray(4), bytearray(4)
    fd = create(io, root / "a", b"\0" * 8)
    io.inject("read", damaged(5, 0x80))
    io.read_into(fd, [first, second], 0)
    assert first + second == b"\0\0\0\0\0\x80\0\0"
    assert (root / "a").read_bytes() == b"\0" * 8


def test_damage_flips_a_byte_written_but_not_the_callers(root: Path) -> None:
    io, data = FaultIO(root), bytearray(8)
    fd = create(io, root / "a")
    io.inject("write", damaged(-1, 0x01))
    assert io.write(fd, [data], 0) == 8
    assert (root / "a").read_bytes() == b"\0" * 7 + b"\x01"
    assert data == b"\0" * 8
    io.sync(fd)
    assert after_crash(io, root.parent)["a"] == b"\0" * 7 + b"\x01"


def test_damage_reaches_direct_writes(root: Path) -> None:
    io = FaultIO(root)
    create(io, root / "a", b"\1" * PAGE)
    try:
        fd = io.open(str(root / "a"), os.O_RDWR | DIRECT)
    except OSError:
        pytest.skip("the file system has no direct access")
    io.inject("write", damaged(7, 0x02))
    assert io.write(fd, [memoryview(bytearray(2 * PAGE))[:0], _page()], 0) == PAGE
    assert (root / "a").read_bytes()[:9] == b"\0" * 7 + b"\2\0"


def _page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE))


def test_a_misdirected_write_misses_its_place(root: Path) -> None:
    io, out = FaultIO(root), bytearray(2)
    fd = create(io, root / "a", b"01234567")
    io.inject("write", misdirected(4), nth=1)
    io.inject("read", misdirected(-1))
    assert io.write(fd, [b"ab"], 0) == 2
    assert (root / "a").read_bytes() == b"0123ab67"
    assert io.read(fd, out, 5) == 2
    assert out == b"ab"


def test_a_delay_passes_before_the_call(root: Path) -> None:
    io, clock = FaultIO(root), FakeClock()
    fd = create(io, root / "a", b"x")
    io.inject("size", delayed(30.0, clock.advance))
    assert io.size(fd) == 1
    assert clock() == 30.0


def test_a_call_hangs_until_it_is_released(root: Path) -> None:
    io, released, arrived = FaultIO(root), threading.Event(), threading.Event()
    fd = create(io, root / "a", b"before")
    io.inject("write", hanging(released, arrived))
    thread = threading.Thread(target=io.write, args=(fd, [b"after!"], 0))
    thread.start()
    assert arrived.wait(30)
    assert (root / "a").read_bytes() == b"before"
    assert io.size(fd) == 6, "other calls go on"
    released.set()
    thread.join(30)
    assert (root / "a").read_bytes() == b"after!"


def test_any_function_is_an_effect(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"x")
    seen: list[tuple[str, str, int]] = []

    def note(call: Call) -> None:
        seen.append((call.kind, call.name, call.offset))

    io.inject("*", note)
    io.inject("reached", note, name="middle")
    io.read(fd, bytearray(1), 5)
    io.reached("middle")
    io.reached("end")
    assert seen == [("read", "a", 5), ("reached", "middle", 0)]
    assert io.points == {"middle": 1, "end": 1}


# Which calls


@pytest.mark.parametrize(
    ("schedule", "hit"),
    [
        ((3, None, None), [3]),
        ((None, 4, None), [4, 5, 6]),
        ((None, None, None), [1, 2, 3, 4, 5, 6]),
        ((None, None, 1), [1, 2, 3, 4, 5, 6]),
        ((7, None, None), []),
    ],
)
def test_faults_strike_when_they_are_due(
    root: Path, schedule: tuple[int | None, int | None, int | None], hit: list[int]
) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"x")
    nth, since, one_in = schedule
    fault = io.inject("size", error(errno.EIO), nth=nth, since=since, one_in=one_in)
    failed = []
    for number in range(1, 7):
        io.list(str(root))
        try:
            io.size(fd)
        except OSError:
            failed.append(number)
    assert failed == hit
    assert fault.hits == len(hit)


def test_random_faults_strike_one_call_in_so_many_again_with_the_same_seed(root: Path) -> None:
    def struck(seed: int) -> list[int]:
        io, numbers = FaultIO(root, seed=seed), []
        io.inject("list", lambda _: numbers.append(io.counts["list"]), one_in=8)
        for _ in range(800):
            io.list(str(root))
        return numbers

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert 60 < len(struck(1)) < 150


def test_faults_choose_files_by_name_and_can_be_lifted(root: Path) -> None:
    io = FaultIO(root)
    first, second = create(io, root / "a.seg", b"x"), create(io, root / "b.txt", b"y")
    io.inject("size", error(errno.EIO), name="*.seg")
    assert io.size(second) == 1
    with pytest.raises(OSError, match="injected"):
        io.size(first)
    io.heal()
    assert io.size(first) == 1


def test_a_sweep_over_counted_calls_reaches_each_one(tmp_path: Path) -> None:
    def operation(io: FaultIO, path: str) -> None:
        fd = io.open(path, os.O_RDWR | os.O_CREAT)
        try:
            write_fully(io, fd, [b"abc"], 0)
            io.sync(fd)
        finally:
            io.close(fd)
        io.reached("end")

    quiet = FaultIO(tmp_path)
    operation(quiet, str(tmp_path / "quiet"))
    assert quiet.calls == 4
    failed = []
    for number in range(1, quiet.calls + 2):
        io = FaultIO(tmp_path)
        io.inject("*", error(errno.EIO), nth=number)
        try:
            operation(io, str(tmp_path / str(number)))
        except OSError as caught:
            failed.append(str(caught).split("injected into ")[1].split(")")[0])
    assert failed == ["open", "write", "sync", "close"]


@pytest.mark.parametrize("kinds", ["", "reading", "read lseek"])
def test_unknown_kinds_are_refused(root: Path, kinds: str) -> None:
    with pytest.raises(ConfigError, match="expected names out of open"):
        FaultIO(root).inject(kinds, error(errno.EIO))


@pytest.mark.parametrize(
    ("nth", "since", "one_in"), [(0, None, None), (1, 2, None), (None, None, -1)]
)
def test_impossible_schedules_are_refused(
    root: Path, nth: int | None, since: int | None, one_in: int | None
) -> None:
    with pytest.raises(ConfigError, match="one of them at most"):
        FaultIO(root).inject("read", error(errno.EIO), nth=nth, since=since, one_in=one_in)


@pytest.mark.parametrize("effect", [short(1), damaged(), misdirected(5)])
def test_effects_on_bytes_are_refused_where_none_move(root: Path, effect: Effect) -> None:
    io = FaultIO(root)
    io.inject("list", effect)
    with pytest.raises(ConfigError, match="list moves no bytes"):
        io.list(str(root))


# Power loss: content


def test_unsynced_bytes_vanish_and_synced_ones_stay(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"synced")
    io.write(fd, [b"NEW"], 0)
    io.write(fd, [b"longer"], 9)
    assert after_crash(io, root.parent)["a"] == b"synced"
    assert after_crash(io, root.parent, "all")["a"] == b"NEWced\0\0\0longer"
    io.sync(fd)
    assert after_crash(io, root.parent)["a"] == b"NEWced\0\0\0longer"
    assert (root / "a").read_bytes() == b"NEWced\0\0\0longer", "the real file is left alone"


def test_a_write_over_an_unsynced_one_keeps_what_was_synced(root: Path) -> None:
    io, content = FaultIO(root), b"o" * 3 * PAGE
    fd = create(io, root / "a", content)
    io.write(fd, [b"N" * 10], PAGE - 5)
    io.write(fd, [b"N" * 2 * PAGE], PAGE // 2)
    assert after_crash(io, root.parent)["a"] == content


def test_no_seed_saves_what_must_be_lost(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"old")
    for _ in range(8):
        io.write(fd, [b"NEW"], 0)
    contents = [after_crash(io, root.parent, seed=seed)["a"] for seed in range(4)]
    assert contents == [b"old"] * 4


def test_any_subset_of_unsynced_writes_can_survive(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"....")
    for place in range(4):
        io.write(fd, [b"X"], place)
    seen = {after_crash(io, root.parent, "random", seed=seed)["a"] for seed in range(200)}
    assert len(seen) == 16


def test_the_same_seed_leaves_the_same_files(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"." * 64)
    for place in range(64):
        io.write(fd, [b"X"], place)
    first, again, other = (after_crash(io, root.parent, "random", seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_torn_write_mixes_old_and_new_sectors(root: Path, sector: int) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"o" * 8 * sector)
    io.write(fd, [b"n" * 6 * sector], sector)
    torn = 0
    for seed in range(20):
        for keep in ("all", "random"):
            content = after_crash(io, root.parent, keep, tear=sector, seed=seed)["a"]
            sectors = [content[at : at + sector] for at in range(0, len(content), sector)]
            assert {*sectors} <= {b"o" * sector, b"n" * sector}, "a sector is never torn"
            assert sectors[0] == sectors[-1] == b"o" * sector
            torn += 0 < sectors.count(b"n" * sector) < 6
    assert torn > 20


def test_only_the_last_write_is_torn_where_all_survive(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"o" * 4096)
    io.write(fd, [b"1" * 2048], 0)
    io.write(fd, [b"2" * 2048], 2048)
    contents = {after_crash(io, root.parent, "all", tear=512, seed=s)["a"] for s in range(30)}
    assert {content[:2048] for content in contents} == {b"1" * 2048}
    assert len({content[2048:] for content in contents}) > 5


def test_what_a_failed_sync_gave_up_no_later_sync_brings_back(root: Path) -> None:
    """Linux marks the pages clean: the retry succeeds and means nothing."""
    io = FaultIO(root)
    fd = create(io, root / "a", b"old old old")
    io.write(fd, [b"NEW"], 0)
    io.inject("sync", error(errno.EIO), nth=1)
    with pytest.raises(OSError, match="injected"):
        io.sync(fd)
    io.write(fd, [b"NEW"], 8)
    io.sync(fd)
    out = bytearray(11)
    read_fully(io, fd, out, 0)
    assert out == b"NEW old NEW", "the page cache has it"
    for keep in ("none", "all"):
        assert after_crash(io, root.parent, keep)["a"] == b"old old NEW"
    io.write(fd, [b"NEW"], 0)
    io.sync(fd)
    assert after_crash(io, root.parent)["a"] == b"NEW old NEW", "written again, it is durable"


def test_a_cut_after_a_failed_sync_cuts_what_the_disk_has(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"old" * 3000)
    io.write(fd, [b"NEW"], 0)
    io.write(fd, [b"NEW"], 8000)
    io.inject("sync", error(errno.EIO), nth=1)
    with pytest.raises(OSError, match="injected"):
        io.sync(fd)
    io.truncate(fd, 9)
    io.allocate(fd, 0, 9000)
    io.sync(fd)
    assert after_crash(io, root.parent)["a"] == b"oldoldold".ljust(9000, b"\0")


def test_writes_that_come_while_a_sync_runs_are_not_covered_by_it(root: Path) -> None:
    io, released, arrived = FaultIO(root), threading.Event(), threading.Event()
    fd = create(io, root / "a", b"....")
    io.write(fd, [b"1"], 0)
    io.inject("sync", hanging(released, arrived), nth=1)
    thread = threading.Thread(target=io.sync, args=(fd,))
    thread.start()
    assert arrived.wait(30)
    io.write(fd, [b"2"], 1)
    released.set()
    thread.join(30)
    assert after_crash(io, root.parent)["a"] == b"1..."
    assert after_crash(io, root.parent, "all")["a"] == b"12.."


def test_cuts_come_back_and_reserved_bytes_go(root: Path) -> None:
    io = FaultIO(root)
    content = bytes(range(256)) * 64
    fd = create(io, root / "a", content)
    io.truncate(fd, 5000)
    io.write(fd, [b"after the cut"], 9000)
    assert after_crash(io, root.parent)["a"] == content
    cut = content[:5000] + bytes(4000) + b"after the cut"
    assert after_crash(io, root.parent, "all")["a"] == cut == (root / "a").read_bytes()
    io.sync(fd)
    io.allocate(fd, 0, 20_000)
    assert after_crash(io, root.parent)["a"] == cut
    assert after_crash(io, root.parent, "all")["a"] == cut.ljust(20_000, b"\0")


def test_a_file_that_is_opened_empty_was_cut(root: Path) -> None:
    io = FaultIO(root)
    io.close(create(io, root / "a", b"content"))
    fd = io.open(str(root / "a"), os.O_RDWR | os.O_TRUNC)
    assert after_crash(io, root.parent)["a"] == b"content"
    assert after_crash(io, root.parent, "all")["a"] == b""
    io.sync(fd)
    assert after_crash(io, root.parent)["a"] == b""


def test_two_descriptors_are_one_file(root: Path) -> None:
    io = FaultIO(root)
    first = create(io, root / "a", b"content")
    second = io.open(str(root / "a"), os.O_RDWR)
    io.write(first, [b"1"], 0)
    io.write(second, [b"2"], 1)
    assert after_crash(io, root.parent)["a"] == b"content"
    io.sync(second)
    assert after_crash(io, root.parent)["a"] == b"12ntent"


def test_files_from_before_are_durable(root: Path) -> None:
    (root / "a").write_bytes(b"from before")
    io = FaultIO(root)
    assert after_crash(io, root.parent)["a"] == b"from before"
    fd = io.open(str(root / "a"), os.O_RDWR)
    io.write(fd, [b"NEW"], 0)
    assert after_crash(io, root.parent)["a"] == b"from before"


def test_a_file_that_others_replaced_is_another_one(root: Path) -> None:
    (root / "a").write_bytes(b"ours")
    io = FaultIO(root)
    fd = io.open(str(root / "a"), os.O_RDWR)
    io.write(fd, [b"NEW"], 0)
    (root / "theirs").write_bytes(b"theirs")
    os.replace(root / "theirs", root / "a")
    io.close(fd)
    fd = io.open(str(root / "a"), os.O_RDWR)
    io.write(fd, [b"NEW"], 0)
    assert after_crash(io, root.parent)["a"] == b"theirs"
    io.close(fd)


# Power loss: names


def test_a_file_whose_directory_was_not_synced_is_gone_though_its_bytes_were(root: Path) -> None:
    io = FaultIO(root)
    fd = io.open(str(root / "a"), os.O_RDWR | os.O_CREAT)
    io.write(fd, [b"content"], 0)
    io.sync(fd)
    assert after_crash(io, root.parent) == {}
    assert after_crash(io, root.parent, "all") == {"a": b"content"}
    io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {"a": b"content"}


def test_a_name_can_be_durable_before_its_bytes(root: Path) -> None:
    io = FaultIO(root)
    fd = io.open(str(root / "new"), os.O_RDWR | os.O_CREAT)
    io.write(fd, [b"content"], 0)
    io.rename(str(root / "new"), str(root / "a"))
    io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {"a": b""}
    io.sync(fd)
    assert after_crash(io, root.parent) == {"a": b"content"}


def test_a_removed_file_comes_back_with_its_durable_bytes(root: Path) -> None:
    io = FaultIO(root)
    fd = create(io, root / "a", b"synced")
    io.write(fd, [b"not"], 0)
    io.close(fd)
    io.remove(str(root / "a"))
    assert after_crash(io, root.parent) == {"a": b"synced"}
    assert after_crash(io, root.parent, "all") == {}
    io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {}


def test_a_replaced_file_comes_back_with_both_names(root: Path) -> None:
    io = FaultIO(root)
    create(io, root / "a", b"old")
    create(io, root / "b", b"new")
    io.rename(str(root / "b"), str(root / "a"))
    assert after_crash(io, root.parent) == {"a": b"old", "b": b"new"}
    assert after_crash(io, root.parent, "all") == {"a": b"new"}
    io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {"a": b"new"}


def test_a_move_to_another_directory_can_be_half_done(root: Path) -> None:
    io = FaultIO(root)
    for name in ("x", "y"):
        io.make_directory(str(root / name))
    io.sync_directory(str(root))
    create(io, root / "x" / "a", b"content")
    io.rename(str(root / "x" / "a"), str(root / "y" / "a"))
    seen = {tuple(after_crash(io, root.parent, "random", seed=seed)) for seed in range(40)}
    assert seen == {("x/a",), ("y/a",), ("x/a", "y/a"), ()}
    io.sync_directory(str(root / "y"))
    assert after_crash(io, root.parent) == {"x/a": b"content", "y/a": b"content"}


def test_a_lost_directory_takes_its_files_along(root: Path) -> None:
    io = FaultIO(root)
    io.make_directory(str(root / "folder"))
    create(io, root / "folder" / "a", b"content")
    assert after_crash(io, root.parent) == {}
    io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {"folder/a": b"content"}


def test_a_directory_sync_that_fails_covers_nothing(root: Path) -> None:
    io = FaultIO(root)
    io.open(str(root / "a"), os.O_RDWR | os.O_CREAT)
    io.inject("sync_directory", error(errno.EIO))
    with pytest.raises(OSError, match="injected"):
        io.sync_directory(str(root))
    assert after_crash(io, root.parent) == {}


def test_random_names_survive_on_their_own(root: Path) -> None:
    io = FaultIO(root)
    for name in "ab":
        io.open(str(root / name), os.O_RDWR | os.O_CREAT)
    seen = {tuple(after_crash(io, root.parent, "random", seed=seed)) for seed in range(40)}
    assert seen == {(), ("a",), ("b",), ("a", "b")}


def test_files_that_do_not_come_through_the_seam_are_copied(root: Path) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "data.mdb").write_bytes(b"as it is")
    (root / "link").symlink_to(root / "folder" / "data.mdb")
    io = FaultIO(root)
    assert after_crash(io, root.parent) == {"folder/data.mdb": b"as it is"}

    def copy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes().upper())

    io.crash(root.parent / "copied", keep="none", copy=copy)
    assert (root.parent / "copied" / "folder" / "data.mdb").read_bytes() == b"AS IT IS"


def test_files_outside_the_root_are_served_but_not_followed(tmp_path: Path, root: Path) -> None:
    io = FaultIO(root)
    fd = io.open(str(tmp_path / "other"), os.O_RDWR | os.O_CREAT)
    io.write(fd, [b"x"], 0)
    io.sync(fd)
    io.close(fd)
    io.rename(str(tmp_path / "other"), str(tmp_path / "another"))
    io.remove(str(tmp_path / "another"))
    assert after_crash(io, tmp_path, "all") == {}


def test_a_crash_keeps_modes_and_wants_an_empty_place(root: Path, tmp_path: Path) -> None:
    io = FaultIO(root)
    create(io, root / "a", b"x")
    io.crash(tmp_path / "into", keep="none")
    assert (tmp_path / "into" / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="expected an empty or new directory"):
        io.crash(tmp_path / "into", keep="none")


def test_directories_are_not_renamed_behind_the_model(root: Path) -> None:
    io = FaultIO(root)
    io.make_directory(str(root / "folder"))
    with pytest.raises(ConfigError, match="names of files only"):
        io.rename(str(root / "folder"), str(root / "other"))


def test_removed_files_give_their_descriptors_back(root: Path) -> None:
    io = FaultIO(root)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        io.close(create(io, root / "a", b"x"))
        io.remove(str(root / "a"))
        io.sync_directory(str(root))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


# The model against another one


NAMES = ("a", "b", "c")
SPAN = 3 * PAGE


class Twin:
    """What one file may hold: for each byte that is not certain, all its possible values."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()
        self.possible: list[tuple[int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.now.extend(bytes(max(0, end - len(self.now))))
        self.now[offset:end] = data
        self.possible.append((offset, data))

    def resize(self, size: int) -> None:
        self.now = self.now[:size].ljust(size, b"\0")
        self.possible.append((size, b""))

    def sync(self) -> None:
        self.durable = bytearray(self.now)
        self.possible.clear()

    def allows(self, content: bytes) -> bool:
        values = [Counter([byte]) for byte in self.durable.ljust(SPAN * 2, b"\0")]
        sizes = {len(self.durable)}
        for offset, data in self.possible:
            end = offset + len(data)
            sizes |= {end, *range(offset - offset % 512 + 512, end, 512)}
            for at, byte in enumerate(data, offset):
                values[at][byte] += 1
        if self.possible:
            for at in range(min(sizes), SPAN * 2):
                values[at][0] += 1
        return len(content) in sizes and all(
            byte in allowed for byte, allowed in zip(content, values, strict=False)
        )


class PowerLoss(RuleBasedStateMachine):
    """Files are written, cut, synced, renamed and removed; the power may go at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.root = Path(self.folder.name) / "disk"
        self.root.mkdir()
        self.crashes = 0
        self.names: dict[str, Twin] = {}
        self.durable_names: dict[str, Twin] = {}
        self.unsynced_names: list[dict[str, Twin | None]] = []
        self.fds: dict[str, int] = {}

    @initialize(old=st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=SPAN), min_size=1))
    def begin(self, old: dict[str, bytes]) -> None:
        for name, content in old.items():
            (self.root / name).write_bytes(content)
            twin = Twin()
            twin.now[:] = twin.durable[:] = content
            self.names[name] = self.durable_names[name] = twin
        self.io = FaultIO(self.root)
        self.fds = {name: self.io.open(str(self.root / name), os.O_RDWR) for name in old}

    def path(self, name: str) -> str:
        return str(self.root / name)

    @rule(name=st.sampled_from(NAMES))
    def create(self, name: str) -> None:
        if name not in self.names:
            self.fds[name] = self.io.open(self.path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self.names[name] = Twin()
            self.unsynced_names.append({name: self.names[name]})

    @precondition(lambda self: self.names)
    @rule(
        data=st.data(),
        page=st.integers(0, 2),
        place=st.integers(-30, 30),
        content=st.binary(min_size=1, max_size=40),
    )
    def write(self, data: st.DataObject, page: int, place: int, content: bytes) -> None:
        offset = max(0, page * PAGE + place)
        name = data.draw(st.sampled_from(sorted(self.names)))
        content *= data.draw(st.sampled_from([1, 20, 100]))
        self.io.write(self.fds[name], [content], offset)
        self.names[name].write(offset, content)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), size=st.integers(0, SPAN))
    def truncate(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.io.truncate(self.fds[name], size)
        self.names[name].resize(size)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.io.sync(self.fds[name])
        self.names[name].sync()

    @rule()
    def sync_names(self) -> None:
        self.io.sync_directory(str(self.root))
        self.durable_names = dict(self.names)
        self.unsynced_names.clear()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.io.close(self.fds.pop(name))
        self.io.remove(self.path(name))
        del self.names[name]
        self.unsynced_names.append({name: None})

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(NAMES))
        source = data.draw(st.sampled_from(sorted(self.names)))
        if source == target:
            return
        self.io.rename(self.path(source), self.path(target))
        if target in self.fds:
            self.io.close(self.fds.pop(target))
        self.fds[target] = self.fds.pop(source)
        self.names[target] = self.names.pop(source)
        self.unsynced_names.append({target: self.names[target], source: None})

    def crashed(self, keep: Keep, tear: int | None = None, seed: int = 0) -> dict[str, bytes]:
        self.crashes += 1
        into = Path(self.folder.name) / f"crash-{self.crashes}"
        self.io.crash(into, keep=keep, tear=tear, seed=seed)
        return {path.name: path.read_bytes() for path in into.iterdir()}

    @invariant()
    def everything_unsynced_can_be_lost(self) -> None:
        found = self.crashed("none")
        assert found == {name: twin.durable for name, twin in self.durable_names.items()}

    @invariant()
    def nothing_can_be_lost(self) -> None:
        assert self.crashed("all") == {name: twin.now for name, twin in self.names.items()}

    @rule(seed=st.integers(0, 1000), tear=st.sampled_from([None, 512, 4096]))
    def lose_some(self, seed: int, tear: int | None) -> None:
        outcomes = {frozenset(self.durable_names.items())}
        for change in self.unsynced_names:
            outcomes |= {frozenset(_after(dict(names), change).items()) for names in outcomes}
        found = self.crashed("random", tear, seed)
        assert any(
            {name for name, _ in names} == found.keys()
            and all(twin.allows(found[name]) for name, twin in names)
            for names in outcomes
        )

    def teardown(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.folder.cleanup()


def _after(names: dict[str, Twin], change: dict[str, Twin | None]) -> dict[str, Twin]:
    return {name: twin for name, twin in {**names, **change}.items() if twin is not None}


PowerLoss.TestCase.settings = settings(stateful_step_count=12)
TestPowerLoss = PowerLoss.TestCase


# Kill points

CHILD = """
import sys
from tierstore.testing.kills import KillIO
io = KillIO()
for point in ["first", "second", "second", "third"]:
    print(point, flush=True)
    io.reached(point)
"""


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_process_dies_at_the_chosen_arrival(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = run(
        {
            "TIERSTORE_KILL_POINT": "second",
            "TIERSTORE_KILL_COUNT": "2",
            "TIERSTORE_KILL_LOG": str(log),
        }
    )
    assert killed.returncode == -9
    assert killed.stdout.split() == ["first", "second", "second"]
    assert log.read_text().split() == ["first", "second"]


def test_a_process_without_a_point_lives_and_says_where_it_was() -> None:
    io = KillIO({})
    for point in ("first", "second", "second"):
        io.reached(point)
    assert io.points == {"first": 1, "second": 2}
