"""Power losses at any moment of any history: B3 to B7 of the list of faults.

`FaultIO` knows what a disk would still have. The directory's file is LMDB's own affair and does not
come through it: it is taken as of its latest commit, as of an earlier sync, or not at all.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import FaultIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.io import FileIO
    from tierstore.testing.faults import Call

SEGMENT = 64 << 10
ROOMY, TIGHT, LARGER = 20, 2, 24
KEYS = 10
SIZES = (1, 60, 4097, 12_000)
ABSENT = 0
Directory = Literal["now", "previous", "none"]
Recovery = Literal["quiet", "strict"]


def key(number: int) -> bytes:
    name = b"key-%d" % number
    return name if number % 5 else name.ljust(70, b"+")


def value(number: int, version: int) -> bytes:
    coin = random.Random(version)
    return b"%d/%d:" % (number, version) + coin.randbytes(SIZES[version % len(SIZES)])


def capacity(segments: int) -> int:
    return (64 << 10) + segments * SEGMENT


class Loss(NamedTuple):
    """How the power is lost: at which call of the seam, and what of the unsynced survives."""

    call: int
    keep: Literal["none", "all", "random"]
    tear: int | None
    directory: Directory
    seed: int


class Model:
    """What each key may have: its version at the latest sync, and all since then."""

    def __init__(self) -> None:
        self.durable = dict.fromkeys(range(KEYS), ABSENT)
        self.later: dict[int, list[int]] = {number: [] for number in range(KEYS)}
        self.may_lose = False

    def allowed(self) -> list[set[int]]:
        """For each key, the versions of which it may have one."""
        sets = []
        for number, later in self.later.items():
            versions = {self.durable[number], *later}
            sets.append(versions | {ABSENT} if later or self.may_lose else versions)
        return sets

    def sync(self) -> None:
        """Everything is durable."""
        for number, later in self.later.items():
            if later:
                self.durable[number] = later[-1]
                later.clear()

    def forget(self) -> None:
        """Nothing is there, durably."""
        for number, later in self.later.items():
            self.durable[number] = ABSENT
            later.clear()


class Machine:
    """A computer with a store, whose power is lost at a call of the seam, once."""

    def __init__(self, folder: Path, segments: int, loss: Loss) -> None:
        self.disk, self.image = folder / "disk", folder / "image"
        self.disk.mkdir()
        self.io = FaultIO(self.disk)
        self.segments, self.loss = segments, loss
        self.model = Model()
        self.model.may_lose = segments == TIGHT
        self.expected: list[set[int]] | None = None
        self.image_segments = segments
        self.saved: list[bytes] = []
        self.version = 0
        self.store = self.open()
        self.io.inject("*", self.lose, nth=loss.call)

    def open(self) -> KeyedStore:
        return KeyedStore(
            self.disk / "store", Identity(), disk=capacity(self.segments), segment=SEGMENT,
            io=self.io, threads=0,
        )  # fmt: skip

    def lose(self, _: Call | None = None) -> None:
        """Take an image of what a power loss would leave now, and what must be in it."""
        self.expected = self.model.allowed()
        self.image_segments = self.segments
        loss = self.loss
        self.io.crash(
            self.image, keep=loss.keep, tear=loss.tear, seed=loss.seed, copy=self.copy_unseen
        )

    def copy_unseen(self, source: Path, target: Path) -> None:
        if source.name != "data.mdb" or self.loss.directory == "now":
            shutil.copy(source, target)
        elif self.loss.directory == "previous" and len(self.saved) > 1:
            target.write_bytes(self.saved[-2])

    def save_directory(self) -> None:
        (file,) = self.disk.glob("store/*/directory/data.mdb")
        self.saved.append(file.read_bytes())

    def run(self, history: list[tuple[str, list[int]]]) -> None:
        """Do everything; the image may be of any moment in between, or else of the end."""
        for name, numbers in [("put", [0, 1, 2, 7]), ("sync", [0]), *history]:
            getattr(self, name)(numbers)
        if self.expected is None:
            self.lose()
        self.io.heal()
        self.store.close()

    def put(self, numbers: list[int]) -> None:
        versions = list(range(self.version + 1, self.version + 1 + len(numbers)))
        self.version += len(numbers)
        for number, version in zip(numbers, versions, strict=True):
            self.model.later[number].append(version)
        done = self.store.put_many(
            [key(number) for number in numbers],
            [value(number, version) for number, version in zip(numbers, versions, strict=True)],
        )
        assert done.all() or self.model.may_lose
        for number, version, is_done in zip(numbers, versions, done.tolist(), strict=True):
            if not is_done:
                self.model.later[number].remove(version)

    def delete(self, numbers: list[int]) -> None:
        for number in numbers:
            self.model.later[number].append(ABSENT)
        self.store.delete_many([key(number) for number in numbers])

    def sync(self, _: list[int]) -> None:
        self.store.sync()
        self.model.sync()
        self.save_directory()

    def clear(self, _: list[int]) -> None:
        for later in self.model.later.values():
            later.append(ABSENT)
        self.store.clear()
        self.model.forget()

    def reopen(self, _: list[int]) -> None:
        self.store.close()
        self.model.sync()
        self.store = self.open()

    def shrink(self, _: list[int]) -> None:
        self.model.may_lose = True
        self.segments = TIGHT
        self.store.resize(disk=capacity(TIGHT))

    def grow(self, _: list[int]) -> None:
        self.segments = max(self.segments, LARGER)
        self.store.resize(disk=capacity(LARGER))


def open_image(
    image: Path, segments: int, *, recovery: Recovery, io: FileIO | None = None
) -> KeyedStore:
    return KeyedStore(
        image / "store", Identity(), disk=capacity(segments), segment=SEGMENT, recovery=recovery,
        io=io, threads=0,
    )  # fmt: skip


def versions_in(store: KeyedStore, model: list[set[int]]) -> list[int]:
    """The version of each key; AssertionError if it is none that the key may have."""
    found = []
    for number, data in enumerate(store.get_many([key(number) for number in range(KEYS)])):
        same = [v for v in model[number] if v != ABSENT and value(number, v) == data]
        assert same or data is None, f"key {number}: {data!r:.60} is none of {model[number]}"
        found.append(same[0] if same else ABSENT)
    assert all(version in allowed for version, allowed in zip(found, model, strict=True)), (
        f"found {found}, expected {model}"
    )
    return found


def check_image(machine: Machine) -> None:
    """The image opens and has what it must; it goes on working, and opens again with the same."""
    assert machine.expected is not None
    # What is cut off cleanly is a crash, and no damage.
    is_clean_cut = machine.loss.keep == "none" and machine.loss.directory == "now"
    recovery: Recovery = "strict" if is_clean_cut else "quiet"
    with open_image(machine.image, machine.image_segments, recovery=recovery) as store:
        found = versions_in(store, machine.expected)
        store.validate()
        assert store.put(b"another", b"value")
        store.sync()
    with open_image(machine.image, machine.image_segments, recovery="strict") as store:
        again = versions_in(store, machine.expected)
        assert store.get(b"another") == b"value"
        store.validate()
    assert again == found or machine.model.may_lose
    names = {path.name for path in machine.image.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith((".new", ".tmp"))]
    event("values there: " + ("some" if any(found) else "none"))


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: the model is the disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4, unique=True)
steps: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.tuples(st.just("put"), numbers),
    st.tuples(st.just("put"), numbers),
    st.tuples(st.just("delete"), numbers),
    st.tuples(st.just("sync"), st.just([])),
    st.tuples(st.sampled_from(["clear", "reopen", "shrink", "grow"]), st.just([])),
)
histories = st.lists(steps, min_size=1, max_size=14)
losses = st.builds(
    Loss,
    call=st.integers(1, 120),
    keep=st.sampled_from(["none", "all", "random"]),
    tear=st.sampled_from([None, 512, 4096]),
    directory=st.sampled_from(get_args(Directory)),
    seed=st.integers(0, 1 << 20),
)
quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
EVERYTHING = [
    ("put", [0, 1, 2, 3]), ("sync", []), ("put", [0, 4, 5]), ("delete", [1]), ("sync", []),
    ("put", [2, 6]), ("delete", [0]), ("put", [0]),
]  # fmt: skip

REOPENED = [("reopen", [0]), ("put", [0, 3]), ("delete", [1]), ("reopen", [0])]
# The file of a value that left is gone; its name must not come back with it.
SHRUNK = [("shrink", [0]), ("delete", [0, 1, 2, 7]), ("sync", [0])]


@quick
@given(history=histories, segments=st.sampled_from([ROOMY, TIGHT]), loss=losses)
@example(EVERYTHING, ROOMY, Loss(10_000, "none", None, "now", 0))
@example(EVERYTHING, ROOMY, Loss(10_000, "random", 512, "none", 0))
@example(EVERYTHING, ROOMY, Loss(10_000, "all", 4096, "previous", 0))
@example(SHRUNK, ROOMY, Loss(10_000, "none", None, "now", 0))
@example(REOPENED, ROOMY, Loss(10_000, "none", None, "now", 0))
def test_what_was_synced_is_there_after_a_power_loss_and_all_else_is_old_or_missing(
    memory: Path, history: list[tuple[str, list[int]]], segments: int, loss: Loss
) -> None:
    """B3, B4, B5, B6."""
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder), segments, loss)
        machine.run(history)
        check_image(machine)


@quick
@given(
    history=histories,
    loss=losses,
    second=st.integers(1, 80),
    keep=st.sampled_from(["none", "random"]),
    tear=st.sampled_from([None, 512]),
)
def test_a_power_loss_during_recovery_loses_nothing_that_was_synced(
    memory: Path,
    history: list[tuple[str, list[int]]],
    loss: Loss,
    second: int,
    keep: Literal["none", "random"],
    tear: int | None,
) -> None:
    """B8: recovery is interrupted three times, each time at a later call."""
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder), ROOMY, loss)
        machine.run(history)
        for attempt in range(3):
            machine.image = interrupted(machine, attempt, second * (attempt + 1), keep, tear)
        check_image(machine)


class _PowerLostError(BaseException):
    pass


def interrupted(
    machine: Machine, attempt: int, nth: int, keep: Literal["none", "random"], tear: int | None
) -> Path:
    """Open an image up to a call of the seam; the image that a power loss there leaves."""
    io = FaultIO(machine.image)
    after = machine.image.with_name(f"image{attempt}")

    def lose(_: Call) -> None:
        io.crash(after, keep=keep, tear=tear, seed=nth)
        raise _PowerLostError

    io.inject("*", lose, nth=nth)
    try:
        open_image(machine.image, machine.image_segments, recovery="quiet", io=io).close()
    except _PowerLostError:
        io.heal()
        return after
    return machine.image


@pytest.mark.parametrize("keep", ["none", "random", "all"])
@pytest.mark.parametrize("tear", [None, 512])
def test_a_power_loss_while_a_store_is_made_leaves_one_that_can_be_made(
    keep: Literal["none", "random", "all"], tear: int | None, memory: Path
) -> None:
    """B6: at every call of the first opening; names without files, files without names."""
    nth, reached_end = 1, False
    while not reached_end:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            disk, image = Path(folder) / "disk", Path(folder) / "image"
            disk.mkdir()
            io = FaultIO(disk)

            def lose(_: Call, io: FaultIO = io, image: Path = image, nth: int = nth) -> None:
                io.crash(image, keep=keep, tear=tear, seed=nth)

            fault = io.inject("*", lose, nth=nth)
            open_image(disk, TIGHT, recovery="strict", io=io).close()
            reached_end = not fault.hits
            if not reached_end:
                with open_image(image, TIGHT, recovery="strict") as store:
                    assert store.put(b"a", b"1")
                with open_image(image, TIGHT, recovery="strict") as store:
                    assert store.get(b"a") == b"1"
                segments = list(image.glob("store/*/segments/*"))
                assert [path.stat().st_size for path in segments] == [SEGMENT] * TIGHT
        nth += 1
    assert nth > 20


@pytest.mark.parametrize("content", [b"", bytes(197), b"{", os.urandom(197)])
def test_a_name_that_outlived_its_content_is_no_identity(content: bytes, tmp_path: Path) -> None:
    """B7: the rename is there, what was written before it is not."""
    with open_image(tmp_path, ROOMY, recovery="quiet") as store:
        assert store.put(b"gone", b"1")
        store.clear()
        assert store.put(b"a", b"1")
    (file,) = tmp_path.glob("store/*/IDENTITY")
    file.write_bytes(content)
    with open_image(tmp_path, ROOMY, recovery="quiet") as store:
        assert store.get_many([b"a", b"gone"]) == [b"1", None]
        assert store.stats().dropped == {"damaged identity": 1}


@pytest.mark.parametrize("kept", [0, 4096, 8192])
def test_a_file_whose_content_was_lost_is_missed(kept: int, tmp_path: Path) -> None:
    """B6, B7: directory and name are there; of the file, nothing, its header, or its tables."""
    with open_image(tmp_path, ROOMY, recovery="quiet") as store:
        assert store.put_many([b"a", b"b"], [b"1", b"2"]).all()
        store.sync()
    for file in tmp_path.glob("store/*/segments/*"):
        file.write_bytes(file.read_bytes()[:kept].ljust(SEGMENT, b"\0"))
    with open_image(tmp_path, ROOMY, recovery="quiet") as store:
        assert store.get_many([b"a", b"b"]) == [None, None]
        assert store.stats().dropped.keys() <= {
            "damaged segment header", "stale table", "damaged row", "corrupt",
        }  # fmt: skip
        assert store.stats().dropped
        assert store.put(b"a", b"3")
    with open_image(tmp_path, ROOMY, recovery="strict") as store:
        assert store.get_many([b"a", b"b"]) == [b"3", None]


def test_the_model_would_notice_a_store_that_does_not_sync(memory: Path) -> None:
    """The tests above can fail: without syncs of files, what was acknowledged is lost."""

    class Careless(FaultIO):
        def sync(self, fd: int) -> None:
            self.size(fd)

    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder), ROOMY, Loss(10_000, "none", None, "now", 0))
        machine.store.close()
        machine.io = Careless(machine.disk)
        machine.store = machine.open()
        machine.run(EVERYTHING)
        with (
            pytest.raises(AssertionError, match="expected"),
            open_image(machine.image, ROOMY, recovery="quiet") as store,
        ):
            versions_in(store, machine.expected or [])
