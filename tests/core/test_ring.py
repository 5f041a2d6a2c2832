"""Many reads at once by io_uring, and what happens where it cannot be had."""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING

import pytest

from tierstore import io as seam
from tierstore.io import FileIO
from tierstore.reads import Read, ReadPool
from tierstore.ring import DEPTH, Ring, open_ring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 1 << 20
CONTENT = random.Random(0).randbytes(SIZE)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = open_ring()
    if ring is None:
        pytest.skip("no io_uring here")
    yield ring
    ring.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def requests(fd: int, count: int, seed: int = 1) -> list[tuple[int, int, bytearray]]:
    choose = random.Random(seed)
    sizes = [choose.randrange(1, 5000) for _ in range(count)]
    return [(fd, choose.randrange(SIZE - size), bytearray(size)) for size in sizes]


def as_lists(
    reads: list[tuple[int, int, bytearray]],
) -> list[tuple[int, int, list[bytearray]]]:
    return [(fd, at, [buffer]) for fd, at, buffer in reads]


@pytest.mark.parametrize("count", [0, 1, DEPTH - 1, DEPTH, DEPTH + 1, 1000])
def test_every_buffer_is_filled_once(ring: Ring, fd: int, count: int) -> None:
    """More than the queues hold, and twice, so that they go round."""
    for seed in (1, 2):
        reads = requests(fd, count, seed)
        done = sorted(ring.read(as_lists(reads)))
        assert done == [(i, len(buffer)) for i, (_, _, buffer) in enumerate(reads)]
        assert all(buffer == CONTENT[at : at + len(buffer)] for _, at, buffer in reads)


def test_a_read_fills_several_buffers(ring: Ring, fd: int) -> None:
    choose = random.Random(2)
    reads = [
        (fd, 2000 * i, [bytearray(choose.randrange(1, 90)) for _ in range(choose.randrange(1, 20))])
        for i in range(300)
    ]
    counts = dict(ring.read(reads))
    for number, (_, at, buffers) in enumerate(reads):
        together = b"".join(buffers)
        assert counts[number] == len(together)
        assert together == CONTENT[at : at + len(together)]


def test_the_end_of_a_file_and_errors_are_numbers(ring: Ring, fd: int) -> None:
    reads = [(fd, SIZE - 3, bytearray(8)), (fd, SIZE, bytearray(8)), (-1, 0, bytearray(8))]
    counts = dict(ring.read(as_lists(reads)))
    assert counts[0] == 3
    assert counts[1] == 0
    assert counts[2] < 0


def test_what_is_under_way_is_done_when_reading_ends_early(ring: Ring, fd: int) -> None:
    """Otherwise the system would write to memory that is somebody else's by then."""
    first = requests(fd, 500)
    reading = ring.read(as_lists(first))
    next(reading)
    reading.close()
    before = [bytes(buffer) for _, _, buffer in first]
    again = requests(fd, 300, seed=3)
    assert sorted(ring.read(as_lists(again))) == [(i, len(b)) for i, (_, _, b) in enumerate(again)]
    assert [bytes(buffer) for _, _, buffer in first] == before


def test_a_large_batch_is_read_by_one_thread(fd: int) -> None:
    if not FileIO().reads_many:
        pytest.skip("no io_uring here")
    threads: set[int] = set()
    buffers = [bytearray(100) for _ in range(500)]
    batch = [
        Read(fd, 300 * i, buffer, lambda: threads.add(threading.get_ident()))
        for i, buffer in enumerate(buffers)
    ]
    pool = ReadPool(FileIO())
    assert pool.begin(batch).wait() == [None] * 500
    assert all(buffers[i] == CONTENT[300 * i : 300 * i + 100] for i in range(500))
    assert len(threads) == 1
    pool.close()


def test_a_bad_place_in_a_large_batch_costs_itself_only(fd: int) -> None:
    buffers = [bytearray(100) for _ in range(200)]
    batch = [Read(fd, 300 * i, buffer) for i, buffer in enumerate(buffers)]
    batch[7] = Read(fd, SIZE + 5, buffers[7])
    batch[9] = Read(-1, 0, buffers[9])
    pool = ReadPool(FileIO())
    outcomes = pool.read(batch)
    assert [i for i, outcome in enumerate(outcomes) if outcome is not None] == [7, 9]
    assert all(isinstance(outcomes[i], OSError) for i in (7, 9))
    pool.close()


def test_a_bad_place_in_a_run_costs_itself_only(fd: int) -> None:
    """Runs of three reads; the first one ends behind the file, the eleventh fails its check."""

    def fail() -> None:
        raise ValueError("wrong")

    at = [SIZE + 10 - 30 * n - 10 * m for n in range(40) for m in (1, 2, 3)]
    buffers = [bytearray(10) for _ in at]
    batch = [Read(fd, *one) for one in zip(at, buffers, strict=True)]
    batch[10] = Read(fd, at[10], buffers[10], fail)
    pool = ReadPool(FileIO())
    outcomes = pool.read(batch)
    assert [i for i, outcome in enumerate(outcomes) if outcome is not None] == [0, 10]
    assert isinstance(outcomes[10], ValueError)
    assert all(b == CONTENT[a : a + 10] for a, b in zip(at[1:], buffers[1:], strict=True))
    pool.close()


def test_threads_have_rings_of_their_own(fd: int) -> None:
    errors: list[object] = []

    def read(seed: int) -> None:
        for round_ in range(20):
            reads = requests(fd, 100, 100 * seed + round_)
            pool_reads = [Read(*one) for one in reads]
            errors.extend(o for o in pool.read(pool_reads) if o is not None)
            errors.extend(at for _, at, b in reads if b != CONTENT[at : at + len(b)])

    pool = ReadPool(FileIO())
    workers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    pool.close()


def test_without_a_ring_threads_read(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox that forbids it."""
    monkeypatch.setattr(seam, "_rings", seam._Rings())
    monkeypatch.setattr(seam, "open_ring", lambda: None)
    assert not FileIO().reads_many
    reads = requests(fd, 300)
    pool = ReadPool(FileIO())
    assert pool.read([Read(*one) for one in reads]) == [None] * 300
    assert all(buffer == CONTENT[at : at + len(buffer)] for _, at, buffer in reads)
    pool.close()


def test_a_seam_that_is_not_the_systems_is_asked_read_by_read(fd: int) -> None:
    """So that no fault of a test is passed by."""

    class Counting(FileIO):
        reads = 0

        def read(self, fd: int, buffer: object, offset: int) -> int:
            Counting.reads += 1
            return super().read(fd, buffer, offset)  # type: ignore[arg-type]

    io = Counting()
    assert not io.reads_many
    assert list(io.read_many([(fd, 0, [bytearray(4)])])) == []
    pool = ReadPool(io)
    assert pool.read([Read(*one) for one in requests(fd, 200)]) == [None] * 200
    assert Counting.reads >= 200
    pool.close()
