"""Blocks on their way to a device, which a mock stands for: no GPU takes part here.

The mock copies when somebody waits, and then what the buffer holds: whoever fills it before that
sees other bytes arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from chains import BLOCK, LAYOUT
from hypothesis import given
from hypothesis import strategies as st

from tierstore.aligned import ALIGNMENT
from tierstore.cuda import CudaCopies
from tierstore.errors import CapacityError, ConfigError
from tierstore.interfaces import Selection
from tierstore.memory import Memory
from tierstore.policies import LRU
from tierstore.staging import Staging
from tierstore.store import BlockStore
from tierstore.tiers import PagedTier
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Bytes, Completion, Ids

LIMIT = 1 << 20


class Device:
    """Memory of the mock device: no array that host code could write to."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.shape = array.shape


def on_device(array: Bytes) -> Bytes:
    return Device(array)  # type: ignore[return-value]


class MockCopies:
    """Copies when they are waited for; those of some numbers fail, as they begin or later."""

    def __init__(self, late: set[int] = frozenset(), early: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.late, self.early = late, early
        self.locked: list[int] = []
        self.begun: list[int] = []
        self.under_way: set[int] = set()
        self.most = 0

    def lock(self, pages: Bytes) -> None:
        assert pages.ctypes.data % ALIGNMENT == 0
        self.locked.append(pages.nbytes)

    def unlock(self, pages: Bytes) -> None:
        assert not self.under_way
        self.locked.remove(pages.nbytes)

    def begin(self, blocks: Bytes, out: Bytes, rows: Ids, start: int, stop: int) -> Completion:
        assert isinstance(out, Device)
        number, target = len(self.begun), out.array
        self.begun.append(blocks.ctypes.data)
        if number in self.early:
            raise OSError("the device is gone")
        self.under_way.add(number)
        self.most = max(self.most, len(self.under_way))
        copies = self

        class Pending:
            def wait(self) -> None:
                copies.under_way.remove(number)
                if number in copies.late:
                    raise OSError(f"copy {number} failed")
                target[rows, start:stop] = blocks[:, start:stop]

        return Pending()


def staging_of(
    copies: MockCopies, *, blocks: int = 3, count: int = 2, limit: int = LIMIT
) -> Staging:
    memory = Memory(limit, "dram")
    staging = Staging(LAYOUT, memory, copies, buffer_bytes=blocks * BLOCK, count=count)
    staging.open()
    return staging


def numbered(count: int) -> Bytes:
    return np.random.default_rng(count).integers(0, 256, (count, BLOCK), np.uint8)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_every_block_arrives_in_its_row_however_many_calls_share_the_buffers(
    sizes: list[int], blocks: int, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    source, copies = numbered(40), MockCopies()
    staging = staging_of(copies, blocks=blocks, count=count)
    out, expected = np.zeros((200, BLOCK), np.uint8), np.zeros((200, BLOCK), np.uint8)
    free, under_way = random.permutation(200).astype(np.int32), []
    for size in sizes:
        rows, free = free[:size], free[size:]
        slots = random.integers(0, 40, size).astype(np.int32)
        expected[rows] = source[slots]
        under_way.append(staging.send(source, slots, on_device(out), rows, [(0, BLOCK)]))
    assert copies.most <= count
    assert len(set(copies.begun)) <= count, "the same buffers serve again"
    for each in random.permutation(len(under_way)).tolist():
        under_way[each].wait()
    assert not copies.under_way
    assert np.array_equal(out, expected)
    under_way[0].wait()
    staging.close()


def test_the_source_may_change_once_a_call_returned() -> None:
    source = numbered(4)
    before, out = source.copy(), np.zeros((4, BLOCK), np.uint8)
    staging = staging_of(MockCopies(), blocks=2)
    all_of = np.arange(4, dtype=np.int32)
    sent = staging.send(source, all_of, on_device(out), all_of, [(0, BLOCK)])
    source[:] = 0
    sent.wait()
    assert np.array_equal(out, before)
    staging.close()


def test_only_the_spans_asked_for_arrive() -> None:
    source, out = numbered(5), np.zeros((5, BLOCK), np.uint8)
    staging = staging_of(MockCopies())
    all_of = np.arange(5, dtype=np.int32)
    staging.send(source, all_of, on_device(out), all_of, [(0, 4), (12, 16)]).wait()
    expected = np.zeros_like(out)
    expected[:, :4], expected[:, 12:16] = source[:, :4], source[:, 12:16]
    assert np.array_equal(out, expected)
    staging.close()


@pytest.mark.parametrize("failure", ["late", "early"])
def test_a_failure_is_told_to_its_own_call_and_leaves_nothing_under_way(failure: str) -> None:
    source, out = numbered(8), np.zeros((8, BLOCK), np.uint8)
    copies = MockCopies(**{failure: {2}})
    staging = staging_of(copies, blocks=2, count=2)
    all_of = np.arange(8, dtype=np.int32)
    first = staging.send(source, all_of[:2], on_device(out), all_of[:2], [(0, BLOCK)])
    with pytest.raises(OSError, match=r"copy 2 failed|the device is gone"):
        staging.send(source, all_of[2:6], on_device(out), all_of[2:6], [(0, BLOCK)]).wait()
    staging.send(source, all_of[6:], on_device(out), all_of[6:], [(0, BLOCK)]).wait()
    first.wait()
    assert not copies.under_way
    assert np.array_equal(out[[0, 1, 6, 7]], source[[0, 1, 6, 7]])
    staging.close()
    assert copies.locked == []


def test_an_interrupt_while_a_buffer_is_waited_for_leaves_it_in_use() -> None:
    source, out = numbered(3), np.zeros((3, BLOCK), np.uint8)
    first, copies = Mock(), Mock()
    first.wait.side_effect = [KeyboardInterrupt, None]
    copies.begin.side_effect = [first, Mock()]
    staging = Staging(LAYOUT, Memory(LIMIT), copies, buffer_bytes=BLOCK, count=1)
    staging.open()
    all_of = np.arange(3, dtype=np.int32)
    staging.send(source, all_of[:1], on_device(out), all_of[:1], [(0, BLOCK)])
    with pytest.raises(KeyboardInterrupt):
        staging.send(source, all_of[1:2], on_device(out), all_of[1:2], [(0, BLOCK)])
    assert copies.begin.call_count == 1
    staging.send(source, all_of[2:], on_device(out), all_of[2:], [(0, BLOCK)])
    assert first.wait.call_count == 2
    staging.close()


def test_a_copy_to_a_gpu_that_fails_as_it_begins_is_not_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy and torch are mocks: what is asked of them is all that can be seen without a GPU."""
    xp, torchs = MagicMock(), Mock()
    monkeypatch.setattr("tierstore.cuda.cupy", lambda: xp)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *_: torchs)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    copies = CudaCopies(torch.device("cuda", 1))
    blocks, rows = numbered(2), np.arange(2, dtype=np.int32)
    copies.begin(blocks, MagicMock(), rows, 0, BLOCK).wait()
    torchs.wait_stream.assert_called_once_with(("current", 1))
    stream = xp.cuda.Stream.return_value
    stream.wait_event.assert_called_once_with(
        xp.cuda.get_current_stream.return_value.record.return_value
    )
    stream.synchronize.assert_not_called()
    out = MagicMock()
    out.__setitem__.side_effect = MemoryError("no room for the rows")
    with pytest.raises(MemoryError, match="no room"):
        copies.begin(blocks, out, rows, 0, BLOCK)
    stream.synchronize.assert_called_once_with()


def test_buffers_are_locked_and_charged_while_they_are_there() -> None:
    copies, memory = MockCopies(), Memory(LIMIT, "dram")
    staging = Staging(LAYOUT, memory, copies, buffer_bytes=4 * BLOCK, count=3)
    assert memory.used_bytes == 0
    for _ in range(2):
        staging.open()
    assert copies.locked == [12 * BLOCK]
    assert memory.by_purpose()["staging"] == 12 * BLOCK + ALIGNMENT
    for _ in range(2):
        staging.close()
    assert memory.used_bytes == 0
    assert copies.locked == []


def test_buffers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one buffer at least"):
        Staging(LAYOUT, Memory(LIMIT), MockCopies(), buffer_bytes=BLOCK - 1)
    with pytest.raises(CapacityError, match="staging needs"):
        staging_of(MockCopies(), limit=2 * BLOCK)


class MockDeviceTier(MemoryTier):
    """A top tier whose slots host code cannot write to."""

    @property
    def view(self) -> Bytes:
        return on_device(self._view)


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_sends_pages_and_slots_to_a_device_through_the_buffers(
    fails: bool, tmp_path: Path
) -> None:
    copies, host = MockCopies(), Memory(LIMIT, "dram")
    top = MockDeviceTier(LAYOUT, Memory(LIMIT, "fast"), "fast")
    dram = MemoryTier(LAYOUT, host, "dram")
    disk = PagedTier(LAYOUT, tmp_path / "blocks", LIMIT)
    dram.staging = disk.staging = Staging(LAYOUT, host, copies, buffer_bytes=3 * BLOCK, count=2)
    store = BlockStore(LAYOUT, [top, dram, disk], [LRU(), LRU()])
    store.resize(0, 20)
    store.resize(1, 10)
    segment, data = store.open(1), numbered(20)
    store.set_quota(segment, np.array([20]))
    home = np.array([[1] * 10 + [2] * 10], np.uint8)
    store.append(segment, data[None], home=home)
    chosen = np.array([1, 4, 6, 8, 11, 13, 14, 18], np.int32)
    selection = Selection(np.array([0, 8]), chosen, np.zeros(8, np.float32))
    if fails:
        copies.late = {1}
        with pytest.raises(OSError, match="copy 1 failed"):
            next(store.visit(selection, segment))
        assert not copies.under_way
        store.validate()
        copies.late = set()
    for visit in store.visit(selection, segment):
        assert np.array_equal(top._view[visit.slots], data[chosen])
    assert store.metrics.tiers[1].hits == store.metrics.tiers[2].hits == 4
    assert len(set(copies.begun)) == 2
    store.validate()
    store.close()
    assert host.by_purpose().get("staging") is None
    assert copies.locked == []
