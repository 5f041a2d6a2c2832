"""Writes that are handed on in the background: in flight, refused, dropped."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chains import BLOCK, LAYOUT, LateTier, make_tier
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.memory import Memory, unlimited
from tierstore.policies import LRU
from tierstore.store import BlockStore
from tierstore.testing import TierTests
from tierstore.tiers import MmapTier, PinnedTier, WriteBehindTier

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tierstore.interfaces import Bytes, Completion, Ids, Tier
    from tierstore.layout import BlockLayout


class TestWriteBehindTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> WriteBehindTier:
        buffer = 3 * layout.block_bytes
        return WriteBehindTier(MmapTier(layout, folder / "b", limit_bytes), unlimited(), buffer)


class Gate(LateTier):
    """Writes only while it is open, and refuses what it is told to refuse."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(LAYOUT, limit_bytes)
        self.is_open = threading.Event()
        self.refusal: OSError | None = None
        self.refused = threading.Event()

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        assert self.is_open.wait(20)
        if self.refusal is not None:
            self.refused.set()
            raise self.refusal
        return super().write(slots, blocks, rows, parts)


def numbered(n: int, first: int = 0) -> Ids:
    return np.arange(first, first + n, dtype=np.int32)


def filled(n: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, BLOCK), np.uint8)


def content(tier: Tier, n: int) -> Bytes:
    out = np.zeros((n, BLOCK), np.uint8)
    tier.read(numbered(n), out, numbered(n)).wait()
    return out


def gated(slots: int = 40, buffer: int = 8) -> tuple[Gate, WriteBehindTier]:
    gate = Gate(slots * BLOCK)
    tier = WriteBehindTier(gate, unlimited(), buffer * BLOCK)
    tier.resize(slots)
    return gate, tier


def test_what_is_in_flight_is_read_from_the_buffer() -> None:
    gate, tier = gated()
    new = filled(8)
    tier.write(numbered(8), new, numbered(8)).wait()
    assert tier.waiting_blocks == 8
    assert np.array_equal(content(tier, 8), new)
    assert not content(gate, 8).any()
    gate.is_open.set()
    tier.sync()
    assert tier.waiting_blocks == 0
    assert np.array_equal(content(gate, 8), new)
    assert np.array_equal(content(tier, 8), new)
    tier.close()


def test_some_parts_of_what_is_in_flight() -> None:
    gate, tier = gated()
    new = filled(4)
    tier.write(numbered(4), new, numbered(4)).wait()
    out = np.zeros((4, BLOCK), np.uint8)
    tier.read(numbered(4), out, numbered(4), ["v"]).wait()
    assert np.array_equal(out[:, BLOCK // 2 :], new[:, BLOCK // 2 :])
    assert not out[:, : BLOCK // 2].any()
    gate.is_open.set()
    tier.close()


def test_a_slot_written_twice_ends_as_the_last_write() -> None:
    gate, tier = gated(buffer=2)
    gate.is_open.set()
    for seed in range(50):
        tier.write(numbered(2, 3), filled(2, seed), numbered(2)).wait()
    tier.sync()
    out = np.zeros((2, BLOCK), np.uint8)
    gate.read(numbered(2, 3), out, numbered(2)).wait()
    assert np.array_equal(out, filled(2, 49))
    tier.close()


def test_a_full_buffer_holds_the_writer_up() -> None:
    gate, tier = gated(buffer=4)
    writer = threading.Thread(
        target=lambda: tier.write(numbered(12), filled(12), numbered(12)).wait()
    )
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    assert tier.waiting_blocks == 4
    gate.is_open.set()
    writer.join(20)
    assert not writer.is_alive()
    tier.sync()
    assert np.array_equal(content(gate, 12), filled(12))
    tier.close()


def test_a_refused_piece_is_told_once_and_lost_never() -> None:
    gate, tier = gated()
    gate.refusal = OSError(5, "the disk is away")
    tier.write(numbered(3), filled(3), numbered(3)).wait()
    gate.is_open.set()
    assert gate.refused.wait(20)
    gate.is_open.clear()
    with pytest.raises(OSError, match="the disk is away"):
        tier.sync()
    assert np.array_equal(content(tier, 3), filled(3))
    gate.refusal = None
    gate.is_open.set()
    tier.sync()
    assert np.array_equal(content(gate, 3), filled(3))
    tier.close()


def test_a_store_stays_true_when_the_disk_refuses(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    gate = Gate(64 * BLOCK)
    dram = PinnedTier(LAYOUT, 4096)
    store = BlockStore(LAYOUT, [dram, WriteBehindTier(gate, unlimited(), 8 * BLOCK)], [LRU()])
    segment = store.open(1)
    gate.refusal = OSError(28, "full")
    store.append(segment, filled(4)[None])
    workers = set(threading.enumerate()) - before
    gate.is_open.set()
    for worker in workers:
        worker.join(20)
    assert gate.refused.is_set()
    gate.is_open.clear()
    with pytest.raises(OSError, match="full"):
        store.append(segment, filled(4, 1)[None])
    store.validate()
    assert store.space.blocks[segment[0]] == 4
    out = np.zeros((1, 4, BLOCK), np.uint8)
    store.read(segment, 0, 4, out)
    assert np.array_equal(out[0], filled(4))
    gate.refusal = None
    gate.is_open.set()
    store.append(segment, filled(4, 2)[None])
    store.tiers[-1].sync()
    out = np.zeros((1, 8, BLOCK), np.uint8)
    store.read(segment, 0, 8, out)
    assert np.array_equal(out[0], np.concatenate([filled(4), filled(4, 2)]))
    store.close()


def test_slots_that_go_take_what_waits_for_them_along() -> None:
    gate, tier = gated()
    tier.write(numbered(6), filled(6), numbered(6)).wait()
    gate.is_open.set()
    tier.resize(2)
    tier.sync()
    assert np.array_equal(content(gate, 2), filled(6)[:2])
    assert gate.capacity == 2
    tier.close()


def test_the_buffer_is_charged_while_there_are_slots() -> None:
    memory = Memory(1 << 20, "dram")
    tier = WriteBehindTier(LateTier(LAYOUT, 1 << 16), memory, 8 * BLOCK)
    assert memory.used_bytes == 0
    tier.resize(10)
    assert memory.by_purpose()["write-behind"] == 8 * BLOCK
    tier.resize(0)
    assert memory.used_bytes == 0
    tier.close()
    tier.close()


@pytest.mark.parametrize("buffer", [0, BLOCK])
def test_a_buffer_that_holds_next_to_nothing_is_refused(buffer: int) -> None:
    with pytest.raises(ConfigError, match="buffer="):
        WriteBehindTier(LateTier(LAYOUT, 1 << 16), unlimited(), buffer)


def test_what_waits_is_dropped_by_close() -> None:
    before = set(threading.enumerate())
    gate, tier = gated()
    tier.write(numbered(8), filled(8), numbered(8)).wait()
    workers = set(threading.enumerate()) - before
    assert {worker.name for worker in workers} == {"tierstore-write-behind"}
    gate.is_open.set()
    tier.close()
    tier.close()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 19), st.integers(1, 9)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
        st.tuples(st.just("sync"), st.just(0), st.just(0)),
        st.tuples(st.just("resize"), st.integers(1, 28), st.just(0)),
    ),
    max_size=40,
)


@given(operations=OPERATIONS, buffer=st.integers(2, 12))
def test_it_reads_as_if_nothing_were_behind(
    operations: list[tuple[str, int, int]], buffer: int
) -> None:
    inner = make_tier("late", 40 * BLOCK, None)  # type: ignore[arg-type]
    tier = WriteBehindTier(inner, unlimited(), buffer * BLOCK)
    tier.resize(20)
    expected: dict[int, Bytes] = {}
    for number, (what, at, count) in enumerate(operations):
        if what == "write":
            slots = numbered(min(count, max(0, tier.capacity - at)), at)
            new = filled(count, number)
            tier.write(slots, new, numbered(len(slots))).wait()
            expected.update(zip(slots.tolist(), new, strict=False))
        elif what == "sync":
            tier.sync()
        elif what == "resize":
            tier.resize(at)
            expected = {slot: block for slot, block in expected.items() if slot < at}
        found = content(tier, tier.capacity)
        for slot, block in expected.items():
            assert np.array_equal(found[slot], block)
    tier.close()
