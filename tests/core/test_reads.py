"""Batches of reads: right bytes, right outcomes, and buffers that nobody else touches."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.aligned import AlignedBuffers
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError, TierOfflineError
from tierstore.io import FileIO
from tierstore.reads import LateReadError, Read, ReadPool
from tierstore.testing import FaultIO
from tierstore.testing.faults import error, hanging, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from _typeshed import WriteableBuffer

SIZE = 1 << 16
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
THREADS = [0, 1, 4]
LONG = 60.0
"""Seconds that no test waits: a deadline that does not pass."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(scope="module")
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def pools() -> Iterator[Callable[..., ReadPool]]:
    """Makes pools, which are closed after the test."""
    made: list[ReadPool] = []

    def make(io: FileIO, threads: int) -> ReadPool:
        made.append(ReadPool(io, threads))
        return made[-1]

    yield make
    ended = [pool.close() for pool in made]
    assert all(ended), "a thread did not end"


class Noting(FileIO):
    """Remembers the place and size of each read."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, list[int]]] = []

    def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
        self.reads.append((offset, [memoryview(buffer).nbytes]))
        return super().read(fd, buffer, offset)

    def read_into(self, fd: int, buffers: Sequence[WriteableBuffer], offset: int) -> int:
        self.reads.append((offset, [memoryview(buffer).nbytes for buffer in buffers]))
        return super().read_into(fd, buffers, offset)


class Hung:
    """A seam whose first read hangs until it is released."""

    def __init__(self, folder: Path) -> None:
        self.released, self.arrived = threading.Event(), threading.Event()
        self.io = FaultIO(folder)
        self.io.inject("read", hanging(self.released, self.arrived), nth=1)


# Right bytes


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("deadline", [None, LONG])
@given(
    ranges=st.lists(
        st.tuples(st.integers(0, SIZE + 50), st.sampled_from([0, 1, 7, 64, 512])), max_size=60
    )
)
def test_every_request_gets_its_bytes_or_the_end_of_the_file(
    fd: int, threads: int, deadline: float | None, ranges: list[tuple[int, int]]
) -> None:
    pool = ReadPool(FileIO(), threads)
    buffers = [bytearray(size) for _, size in ranges]
    outcomes = pool.read(
        [Read(fd, offset, buffer) for (offset, _), buffer in zip(ranges, buffers, strict=True)],
        deadline,
    )
    assert pool.close()
    ends = [offset + size > SIZE and size > 0 for offset, size in ranges]
    assert [isinstance(outcome, TierOfflineError) for outcome in outcomes] == ends
    assert outcomes.count(None) == ends.count(False)
    for (offset, size), buffer, has_ended in zip(ranges, buffers, ends, strict=True):
        assert has_ended or buffer == CONTENT[offset : offset + size]


@pytest.mark.parametrize("threads", THREADS)
def test_many_threads_may_read_at_once(
    fd: int, pools: Callable[..., ReadPool], threads: int
) -> None:
    pool = pools(FileIO(), threads)

    def read(seed: int) -> bool:
        rng = random.Random(seed)
        for number in range(30):
            offsets = [rng.randrange(SIZE - 256) for _ in range(rng.randrange(1, 60))]
            buffers = [bytearray(256) for _ in offsets]
            requests = [Read(fd, at, buffer) for at, buffer in zip(offsets, buffers, strict=True)]
            outcomes = pool.read(requests, LONG if number % 2 else None)
            if any(outcomes) or buffers != [bytearray(CONTENT[at : at + 256]) for at in offsets]:
                return False
        return True

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(read, range(6)))


def test_arrays_and_views_can_be_filled(fd: int, pools: Callable[..., ReadPool]) -> None:
    out = np.zeros((4, 2, 32), np.uint8)
    rows = [Read(fd, 64 * row, out[row]) for row in range(4)]
    assert pools(FileIO(), 2).read(rows) == [None] * 4
    assert out.tobytes() == CONTENT[:256]


@pytest.mark.parametrize("threads", THREADS)
def test_no_requests_have_no_outcomes(pools: Callable[..., ReadPool], threads: int) -> None:
    assert pools(FileIO(), threads).read([]) == []


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("deadline", [None, LONG])
def test_batches_can_be_under_way_while_the_caller_does_something_else(
    fd: int, pools: Callable[..., ReadPool], threads: int, deadline: float | None
) -> None:
    pool = pools(FileIO(), threads)
    buffers = [bytearray(64) for _ in range(90)]
    requests = [Read(fd, 100 * n, buffer) for n, buffer in enumerate(buffers)]
    readings = [pool.begin(requests[part::3], deadline) for part in range(3)]
    assert [reading.wait() for reading in readings[::-1]] == [[None] * 30] * 3
    assert buffers == [CONTENT[100 * n : 100 * n + 64] for n in range(90)]


def test_a_batch_is_read_before_anybody_waits_for_it(
    fd: int, pools: Callable[..., ReadPool]
) -> None:
    read = threading.Event()
    reading = pools(FileIO(), 1).begin([Read(fd, 0, buffer := bytearray(4), read.set)])
    assert read.wait(LONG)
    assert buffer == CONTENT[:4]
    assert reading.wait() == [None]


# How it reads


def test_reads_are_sorted_and_neighbours_read_as_one(
    fd: int, pools: Callable[..., ReadPool]
) -> None:
    io = Noting()
    places = [(300, 100), (0, 50), (50, 10), (5000, 8), (400, 1), (60, 40), (5000, 8)]
    requests = [Read(fd, offset, bytearray(size)) for offset, size in places]
    assert pools(io, 0).read(requests) == [None] * 7
    assert io.reads == [(0, [50, 10, 40]), (300, [100, 1]), (5000, [8]), (5000, [8])]


def test_one_read_has_at_most_a_mebibyte_and_what_the_system_takes(
    tmp_path: Path, pools: Callable[..., ReadPool]
) -> None:
    io = Noting()
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    fd = os.open(tmp_path / "large", os.O_RDONLY)
    pool = pools(io, 0)
    assert not any(pool.read([Read(fd, at << 18, bytearray(1 << 18)) for at in range(12)]))
    assert [len(sizes) for _, sizes in io.reads] == [4, 4, 4]
    io.reads.clear()
    assert not any(pool.read([Read(fd, at, bytearray(1)) for at in range(2050)]))
    assert [len(sizes) for _, sizes in io.reads] == [1024, 1024, 2]
    assert not any(pool.read([Read(fd, 0, bytearray(3 << 20))])), "a large one is not cut"
    os.close(fd)


def test_files_are_not_mixed(path: Path, tmp_path: Path, pools: Callable[..., ReadPool]) -> None:
    (tmp_path / "other").write_bytes(bytes(SIZE))
    fds = [os.open(path, os.O_RDONLY), os.open(tmp_path / "other", os.O_RDONLY)]
    buffers = [bytearray(b"?" * 64) for _ in range(20)]
    # The second file is read from where the first one's last read ends.
    places = [(fds[n % 2], 64 * (n // 2 + n % 2 * 10)) for n in range(20)]
    requests = [Read(*place, buffer) for place, buffer in zip(places, buffers, strict=True)]
    assert not any(pools(FileIO(), 4).read(requests))
    assert b"".join(buffers[::2]) == CONTENT[:640]
    assert b"".join(buffers[1::2]) == bytes(640)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("threads", [2, 5])
def test_so_many_reads_are_under_way_at_once(
    fd: int, pools: Callable[..., ReadPool], threads: int
) -> None:
    """Each read waits until all threads are in one: fewer would wait for ever."""
    together = threading.Barrier(threads)

    class Meeting(FileIO):
        def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
            together.wait(LONG)
            return super().read(fd, buffer, offset)

    requests = [Read(fd, 1000 * number, bytearray(10)) for number in range(threads)]
    assert pools(Meeting(), threads).read(requests, LONG) == [None] * threads


# Outcomes


@pytest.mark.parametrize("threads", THREADS)
def test_a_bad_place_does_not_cost_its_neighbours(
    path: Path, pools: Callable[..., ReadPool], threads: int
) -> None:
    io = FaultIO(path.parent)
    fd = io.open(str(path), os.O_RDONLY)

    def bad(call: object) -> None:
        if getattr(call, "offset", 0) <= 200 < getattr(call, "offset", 0) + 100:
            raise OSError(errno.EIO, "a bad sector")

    io.inject("read", bad)
    io.inject("read", error(errno.EIO), nth=1)
    buffers = [bytearray(100) for _ in range(5)]
    outcomes = pools(io, threads).read(
        [Read(fd, 100 * number, buffer) for number, buffer in enumerate(buffers)]
    )
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [OSError] + [
        type(None)
    ] * 2
    assert b"".join(buffers[3:]) == CONTENT[300:500]
    io.close(fd)


def test_short_reads_are_gone_on_with(path: Path, pools: Callable[..., ReadPool]) -> None:
    io = FaultIO(path.parent)
    fd = io.open(str(path), os.O_RDONLY)
    io.inject("read", short(7))
    buffers = [bytearray(30) for _ in range(4)]
    requests = [Read(fd, 30 * number, buffer) for number, buffer in enumerate(buffers)]
    assert pools(io, 2).read(requests) == [None] * 4
    assert b"".join(buffers) == CONTENT[:120]
    io.close(fd)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("stride", [64, 100], ids=["neighbours", "apart"])
def test_checks_see_filled_buffers_and_decide_the_outcome(
    fd: int, pools: Callable[..., ReadPool], threads: int, stride: int
) -> None:
    damage = CorruptBlockError("the third one")
    buffers = [bytearray(64) for _ in range(6)]
    seen: dict[int, bytes] = {}

    def check(number: int) -> None:
        seen[number] = bytes(buffers[number])
        if number == 2:
            raise damage

    requests = [
        Read(fd, stride * n, buffer, lambda n=n: check(n))  # type: ignore[misc]
        for n, buffer in enumerate(buffers)
    ]
    outcomes = pools(FileIO(), threads).read(requests)
    assert outcomes == [None, None, damage, None, None, None]
    assert seen == {n: CONTENT[stride * n : stride * n + 64] for n in range(6)}


def test_a_check_is_not_made_of_what_was_not_read(fd: int, pools: Callable[..., ReadPool]) -> None:
    called: list[int] = []
    outcomes = pools(FileIO(), 0).read(
        [Read(fd, SIZE, bytearray(1), lambda: called.append(1)), Read(-1, 0, bytearray(1))]
    )
    assert [isinstance(outcome, OSError) for outcome in outcomes] == [True, True]
    assert called == []


# A disk that hangs


def test_a_late_read_keeps_its_buffer_until_it_is_settled(
    path: Path, pools: Callable[..., ReadPool]
) -> None:
    hung = Hung(path.parent)
    fd = hung.io.open(str(path), os.O_RDONLY)
    settled, now = threading.Event(), list[bool]()
    [late] = pools(hung.io, 2).read([Read(fd, 0, bytearray(64))], deadline=1.0)
    assert isinstance(late, LateReadError)
    assert isinstance(late, TierOfflineError)
    assert isinstance(late, TimeoutError)
    before = late.is_settled
    late.when_settled(settled.set)
    assert not settled.is_set()
    hung.released.set()
    assert settled.wait(LONG)
    assert (before, late.is_settled) == (False, True)
    late.when_settled(lambda: now.append(True))
    assert now == [True]
    hung.io.close(fd)


def test_reads_that_were_not_begun_in_time_never_are(
    path: Path, pools: Callable[..., ReadPool]
) -> None:
    hung = Hung(path.parent)
    fd = hung.io.open(str(path), os.O_RDONLY)
    pool, buffers = pools(hung.io, 1), [bytearray(16) for _ in range(8)]
    with ThreadPoolExecutor(1) as caller:
        first = caller.submit(pool.read, [Read(fd, 0, bytearray(8))], LONG)
        assert hung.arrived.wait(LONG)
        requests = [Read(fd, 1000 * number, buffer) for number, buffer in enumerate(buffers)]
        outcomes = pool.read(requests, deadline=0.01)
        assert [getattr(outcome, "is_settled", None) for outcome in outcomes] == [True] * 8
        hung.released.set()
        assert first.result() == [None]
    assert pool.read([Read(fd, 0, bytearray(8))], LONG) == [None]
    assert buffers == [bytes(16)] * 8
    hung.io.close(fd)


def test_others_are_served_while_a_read_hangs(path: Path, pools: Callable[..., ReadPool]) -> None:
    hung = Hung(path.parent)
    fd = hung.io.open(str(path), os.O_RDONLY)
    pool = pools(hung.io, 2)
    with ThreadPoolExecutor(1) as caller:
        first = caller.submit(pool.read, [Read(fd, 0, bytearray(8))], LONG)
        assert hung.arrived.wait(LONG)
        for _ in range(10):
            requests = [Read(fd, 100 * n, bytearray(8)) for n in range(20)]
            assert pool.read(requests, LONG) == [None] * 20
        hung.released.set()
        assert first.result() == [None]
    hung.io.close(fd)


def test_a_deadline_that_has_passed_reads_nothing(fd: int, pools: Callable[..., ReadPool]) -> None:
    for threads in THREADS:
        io = Noting()
        outcomes = pools(io, threads).read([Read(fd, 0, bytearray(8))] * 3, deadline=-1.0)
        assert all(isinstance(outcome, LateReadError) for outcome in outcomes)


def test_a_late_batch_does_not_go_on(path: Path) -> None:
    hung, called, outcomes = Hung(path.parent), list[int](), list[Exception | None]()
    fd = hung.io.open(str(path), os.O_RDONLY)
    pool = ReadPool(hung.io, 1)
    requests = [
        Read(fd, 100 * n, bytearray(8), lambda n=n: called.append(n))  # type: ignore[misc]
        for n in range(8)
    ]
    caller = threading.Thread(target=lambda: outcomes.extend(pool.read(requests, LONG)))
    caller.start()
    assert hung.arrived.wait(LONG)
    assert not pool.close(deadline=0)
    caller.join(LONG)
    settled = [getattr(outcome, "is_settled", None) for outcome in outcomes]
    assert settled == [False] * 4 + [True] * 4, "one thread takes four of eight at first"
    hung.released.set()
    assert pool.close()
    assert called == [0]
    assert hung.io.counts["read"] == 1
    hung.io.close(fd)


# The end


@pytest.mark.parametrize("threads", THREADS)
def test_a_closed_pool_reads_nothing(fd: int, threads: int) -> None:
    pool = ReadPool(FileIO(), threads)
    assert pool.read([Read(fd, 0, bytearray(4))] * 20, LONG) == [None] * 20
    assert pool.close()
    assert pool.close()
    [outcome] = pool.read([Read(fd, 0, buffer := bytearray(4))])
    assert isinstance(outcome, TierOfflineError)
    assert buffer == bytes(4)


def test_closing_frees_callers_of_a_disk_that_hangs(path: Path) -> None:
    hung = Hung(path.parent)
    fd = hung.io.open(str(path), os.O_RDONLY)
    pool, outcomes = ReadPool(hung.io, 1), []
    caller = threading.Thread(
        target=lambda: outcomes.extend(pool.read([Read(fd, 0, bytearray(8))], LONG))
    )
    caller.start()
    assert hung.arrived.wait(LONG)
    assert not pool.close(deadline=0.05)
    caller.join(LONG)
    assert [type(outcome) for outcome in outcomes] == [LateReadError]
    hung.released.set()
    assert pool.close()
    hung.io.close(fd)


def test_a_pool_that_nobody_has_ends_its_threads(fd: int) -> None:
    pool = ReadPool(FileIO(), 3)
    assert pool.read([Read(fd, 100 * n, bytearray(4)) for n in range(40)], LONG) == [None] * 40
    workers = [thread for thread in threading.enumerate() if thread.name == "tierstore-read"]
    assert workers
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    for worker in workers:
        worker.join(LONG)
    assert not any(worker.is_alive() for worker in workers)


def test_buffers_are_not_kept_alive(fd: int, pools: Callable[..., ReadPool]) -> None:
    pool = pools(FileIO(), 2)
    buffer = np.zeros(64, np.uint8)
    gone = threading.Event()
    weakref.finalize(buffer, gone.set)
    assert pool.read([Read(fd, 0, buffer.data)], LONG) == [None]
    del buffer
    assert gone.wait(LONG)


EXIT = """
import os, sys, threading
from tierstore.io import FileIO
from tierstore.reads import Read, ReadPool

class Hangs(FileIO):
    def read(self, fd, buffer, offset):
        if offset == 0:
            threading.Event().wait()
        return super().read(fd, buffer, offset)

fd = os.open(sys.argv[1], os.O_RDONLY)
pool = ReadPool(Hangs(), 4)
late = pool.read([Read(fd, 64 * n, bytearray(8)) for n in range(0, 40, 2)], 0.2)
print(sum(outcome is not None for outcome in late) > 0)
"""


def test_a_process_ends_in_silence_with_reads_that_hang(path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", EXIT, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def _read_in_fork(pool: ReadPool, fd: int) -> None:
    try:
        pool.read([Read(fd, 0, bytearray(4))])
    except ConfigError:
        os._exit(17)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_so(fd: int, pools: Callable[..., ReadPool]) -> None:
    pool = pools(FileIO(), 2)
    pool.read([Read(fd, 100 * n, bytearray(4)) for n in range(9)], LONG)
    child = multiprocessing.get_context("fork").Process(target=_read_in_fork, args=(pool, fd))
    child.start()
    child.join(LONG)
    assert child.exitcode == 17


def test_a_system_without_threads_still_reads(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ReadPool(FileIO(), 4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        buffers = [bytearray(16) for _ in range(10)]
        requests = [Read(fd, 100 * n, buffer) for n, buffer in enumerate(buffers)]
        assert pool.read(requests, LONG) == [None] * 10
    assert buffers[3] == CONTENT[300:316]
    assert pool.close()


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads=-1 in ReadPool"):
        ReadPool(FileIO(), -1)


# Buffers


def test_buffers_are_aligned_apart_and_of_the_size_asked_for() -> None:
    buffers = AlignedBuffers(5000, 3)
    taken = buffers.take(3)
    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in taken]
    assert [address % 4096 for address in addresses] == [0, 0, 0]
    assert [buffer.nbytes for buffer in taken] == [5000] * 3
    assert buffers.nbytes == 3 * 8192
    for number, buffer in enumerate(taken):
        buffer[:] = bytes([number]) * 5000
    assert [set(buffer) for buffer in taken] == [{0}, {1}, {2}]


def test_no_more_buffers_are_taken_than_there_are() -> None:
    buffers = AlignedBuffers(4096, 3)
    first = buffers.take(2)
    rest = buffers.take(5)
    assert (len(first), len(rest), buffers.free) == (2, 1, 0)
    with pytest.raises(CapacityError, match="none of 3 staging buffers became free in 0 s"):
        buffers.take(deadline=0)
    buffers.give(first)
    assert buffers.free == 2
    assert len({id(buffer) for buffer in [*buffers.take(2), *rest]}) == 3


def test_who_waits_gets_a_buffer_that_is_given_back() -> None:
    buffers = AlignedBuffers(4096, 1)
    [buffer] = buffers.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffers.take, 1, LONG)
        buffers.give([buffer])
        assert waiting.result() == [buffer]


def test_only_the_very_buffer_can_be_given_back_and_once() -> None:
    buffers = AlignedBuffers(4096, 2)
    [buffer] = buffers.take()
    with pytest.raises(KeyError):
        buffers.give([buffer[:10]])
    buffers.give([buffer])
    with pytest.raises(KeyError):
        buffers.give([buffer])
    assert buffers.free == 2


def test_a_buffer_of_a_late_read_is_free_once_it_is_settled(
    path: Path, pools: Callable[..., ReadPool]
) -> None:
    hung, buffers = Hung(path.parent), AlignedBuffers(4096, 3)
    fd = hung.io.open(str(path), os.O_RDONLY)
    taken = buffers.take(3)
    [late] = pools(hung.io, 2).read([Read(fd, 0, taken[0])], deadline=1.0)
    buffers.give(taken[:2], [late, None])
    assert buffers.free == 1
    buffers.give(buffers.take(), [OSError()])
    assert buffers.free == 1
    hung.released.set()
    held = [id(buffer) for _ in range(2) for buffer in buffers.take(1, LONG)]
    assert sorted(held) == sorted(map(id, taken[:2]))
    hung.io.close(fd)


@pytest.mark.parametrize(("size", "count"), [(0, 1), (-4096, 1), (4096, 0)])
def test_buffers_without_size_or_number_are_refused(size: int, count: int) -> None:
    with pytest.raises(ConfigError, match="expected a size and a number above 0"):
        AlignedBuffers(size, count)
