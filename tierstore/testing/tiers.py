"""What every tier must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import CapacityError, ConfigError
from tierstore.layout import BlockLayout, Part
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Bytes, Ids, Tier

LIMIT_BYTES = 1 << 18
LAYOUTS = {
    "of whole words": BlockLayout.kv(4, 8, torch.float32),
    "of 51 bytes": BlockLayout(
        (
            Part("k", (3, 5), torch.bfloat16),
            Part("scale", (3,), torch.float32),
            Part("v", (3, 3), torch.uint8),
        )
    ),
    "of one byte": BlockLayout((Part("k", (1,), torch.uint8),)),
}


class TierTests(ABC):
    """Inherit, and make the tier.

    Every test has a tier of its own without slots, for each of three layouts.
    """

    @abstractmethod
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> Tier:
        """A tier without slots that may occupy so many bytes; `folder` is for its files."""

    @pytest.fixture(params=list(LAYOUTS.values()), ids=list(LAYOUTS))
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(request.param, LIMIT_BYTES, tmp_path)
        yield tier
        tier.close()

    def test_a_new_tier_is_empty_and_has_room(self, tier: Tier) -> None:
        assert tier.capacity == 0
        assert tier.used_bytes == 0
        assert 8 <= tier.limit <= LIMIT_BYTES // tier.layout.block_bytes
        assert tier.name
        assert tier.medium

    def test_blocks_come_back_from_the_slots_they_were_put_in(self, tier: Tier) -> None:
        """Slots and rows are both out of order, and differently in reading than in writing."""
        tier.resize(16)
        blocks = _blocks(tier.layout, 16)
        slots, rows = _shuffled(16, 1), _shuffled(16, 2)
        tier.write(slots, blocks, rows).wait()
        out, order, out_rows = _blocks(tier.layout, 16, seed=9), _shuffled(16, 3), _shuffled(16, 4)
        tier.read(slots[order], out, out_rows).wait()
        assert np.array_equal(out[out_rows], blocks[rows[order]])

    def test_other_slots_and_rows_are_left_alone(self, tier: Tier) -> None:
        before = _filled(tier, 8)
        tier.write(_ids(6, 1), _blocks(tier.layout, 4, seed=5), _ids(0, 3)).wait()
        kept = _ids(0, 2, 3, 4, 5, 7)
        assert np.array_equal(_content(tier, kept), before[kept])
        out = _blocks(tier.layout, 5, seed=7)
        untouched = out.copy()
        tier.read(_ids(2, 3), out, _ids(4, 1)).wait()
        assert np.array_equal(out[_ids(4, 1)], before[_ids(2, 3)])
        assert np.array_equal(out[_ids(0, 2, 3)], untouched[_ids(0, 2, 3)])

    def test_a_write_of_some_parts_leaves_the_others_alone(self, tier: Tier) -> None:
        before, new = _filled(tier, 4), _blocks(tier.layout, 4, seed=5)
        for name in (part.name for part in tier.layout.parts):
            tier.write(_ids(0, 1, 2, 3), before, _ids(0, 1, 2, 3)).wait()
            tier.write(_ids(2, 0), new, _ids(1, 3), parts=[name]).wait()
            expected, part = before.copy(), _bytes_of(tier.layout, name)
            expected[_ids(2, 0), part] = new[_ids(1, 3), part]
            assert np.array_equal(_content(tier), expected), name

    def test_a_read_of_some_parts_leaves_the_rest_of_a_row_alone(self, tier: Tier) -> None:
        stored = _filled(tier, 4)
        for name in (part.name for part in tier.layout.parts):
            out = _blocks(tier.layout, 4, seed=7)
            expected, part = out.copy(), _bytes_of(tier.layout, name)
            expected[_ids(1, 3), part] = stored[_ids(2, 0), part]
            tier.read(_ids(2, 0), out, _ids(1, 3), parts=[name]).wait()
            assert np.array_equal(out, expected), name

    def test_naming_all_parts_is_naming_none(self, tier: Tier) -> None:
        stored, names = _filled(tier, 4), [part.name for part in tier.layout.parts][::-1]
        out = np.zeros_like(stored)
        tier.read(_ids(0, 1, 2, 3), out, _ids(0, 1, 2, 3), parts=names).wait()
        assert np.array_equal(out, stored)

    def test_an_unknown_part_is_refused(self, tier: Tier) -> None:
        blocks = _filled(tier, 2)
        with pytest.raises(ConfigError, match="'unknown'"):
            tier.read(_ids(0), blocks, _ids(0), parts=["unknown"])
        with pytest.raises(ConfigError, match="'unknown'"):
            tier.write(_ids(0), blocks, _ids(0), parts=["unknown"])

    def test_a_slot_that_was_never_written_can_be_read(self, tier: Tier) -> None:
        """As any bytes, and without harm to its neighbours."""
        tier.resize(4)
        blocks = _blocks(tier.layout, 1)
        tier.write(_ids(2), blocks, _ids(0)).wait()
        assert np.array_equal(_content(tier)[2:3], blocks)

    def test_moving_nothing_is_allowed(self, tier: Tier) -> None:
        before = _filled(tier, 3)
        tier.write(_ids(), _blocks(tier.layout, 1), _ids()).wait()
        tier.write(_ids(1), _blocks(tier.layout, 1), _ids(0), parts=[]).wait()
        tier.read(_ids(), np.empty((0, tier.layout.block_bytes), np.uint8), _ids()).wait()
        assert np.array_equal(_content(tier), before)

    def test_resizing_keeps_what_stands_below(self, tier: Tier) -> None:
        before = _filled(tier, 6)
        for slots in (40, 3, 3, 5, 8):
            tier.resize(slots)
            assert tier.capacity == slots
            assert np.array_equal(_content(tier, _ids(0, 1, 2)), before[:3])
        tier.resize(0)
        assert tier.capacity == tier.used_bytes == 0
        assert np.array_equal(_filled(tier, 4), _content(tier))

    def test_the_limit_can_be_reached_but_not_passed(self, tier: Tier) -> None:
        limit = tier.limit
        before = _filled(tier, limit)
        assert tier.capacity == limit
        assert tier.used_bytes <= LIMIT_BYTES
        with pytest.raises(CapacityError):
            tier.resize(limit + 1)
        assert tier.capacity == limit
        assert tier.used_bytes <= LIMIT_BYTES
        assert np.array_equal(_content(tier), before)

    def test_used_bytes_follow_the_slots(self, tier: Tier) -> None:
        size = tier.layout.block_bytes
        for slots in (1, tier.limit, 2):
            tier.resize(slots)
            assert slots * size <= tier.used_bytes <= LIMIT_BYTES
        assert tier.used_bytes < LIMIT_BYTES, "what was given back is still counted"

    def test_other_data_of_its_memory_lowers_the_limit(self, tier: Tier) -> None:
        if tier.memory is None:
            pytest.skip("the tier is outside memory")
        tier.resize(1)
        before = tier.used_bytes
        array = tier.memory.take(LIMIT_BYTES // 2, np.uint8, "test")
        assert tier.used_bytes == before + array.nbytes
        assert tier.limit == (LIMIT_BYTES - array.nbytes) // tier.layout.block_bytes
        with pytest.raises(CapacityError):
            tier.resize(tier.limit + 1)
        assert tier.capacity == 1

    def test_the_view_is_the_slots(self, tier: Tier) -> None:
        if not tier.is_addressable:
            with pytest.raises(ConfigError, match="cannot be read in place"):
                _ = tier.view
            return
        stored = _filled(tier, 5)
        assert tier.view.shape == (5, tier.layout.block_bytes)
        tier.view[1] = 0
        stored[1] = 0
        assert np.array_equal(_content(tier), stored)

    def test_threads_may_read_at_once(self, tier: Tier) -> None:
        stored, everything = _filled(tier, 64), np.arange(64, dtype=np.int32)

        def read(_: int) -> bool:
            return all(np.array_equal(_content(tier, everything), stored) for _ in range(20))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))

    def test_a_slot_may_be_read_into_several_rows(self, tier: Tier) -> None:
        stored = _filled(tier, 4)
        out = _blocks(tier.layout, 5, seed=7)
        tier.read(_ids(2, 0, 2, 2), out, _ids(4, 1, 0, 3)).wait()
        assert np.array_equal(out[_ids(4, 1, 0, 3)], stored[_ids(2, 0, 2, 2)])

    def test_transfers_under_way_leave_each_other_alone(self, tier: Tier) -> None:
        """Several are begun before the first is waited for, and the last is waited for first."""
        _filled(tier, 32)
        blocks = [_blocks(tier.layout, 8, seed) for seed in range(4)]
        slots, rows = np.split(_shuffled(32, 1), 4), _shuffled(8, 2)
        writes = [tier.write(s, b, rows) for s, b in zip(slots, blocks, strict=True)]
        for write in reversed(writes):
            write.wait()
        outs = [np.empty_like(block) for block in blocks]
        reads = [tier.read(s, out, rows) for s, out in zip(slots, outs, strict=True)]
        for read in reversed(reads):
            read.wait()
        for out, written in zip(outs, blocks, strict=True):
            assert np.array_equal(out, written)

    def test_a_buffer_is_the_callers_again_when_its_transfer_is_over(self, tier: Tier) -> None:
        """A tier that kept the caller's memory would see it change."""
        tier.resize(4)
        blocks, everything = _blocks(tier.layout, 4), _ids(0, 1, 2, 3)
        written = blocks.copy()
        tier.write(everything, blocks, everything).wait()
        blocks[:] = 0
        assert np.array_equal(_content(tier), written)
        out = np.empty_like(blocks)
        tier.read(everything, out, everything).wait()
        out[:] = 0
        assert np.array_equal(_content(tier), written)

    def test_what_is_handed_over_is_not_changed(self, tier: Tier) -> None:
        tier.resize(8)
        slots, rows, blocks = _shuffled(8, 1), _shuffled(8, 2), _blocks(tier.layout, 8)
        before = slots.copy(), rows.copy(), blocks.copy()
        tier.write(slots, blocks, rows).wait()
        tier.read(slots, np.empty_like(blocks), rows).wait()
        assert np.array_equal(slots, before[0])
        assert np.array_equal(rows, before[1])
        assert np.array_equal(blocks, before[2])

    def test_a_refused_transfer_changes_nothing(self, tier: Tier) -> None:
        before, used = _filled(tier, 3), tier.used_bytes
        with pytest.raises(ConfigError):
            tier.write(_ids(1), _blocks(tier.layout, 1), _ids(0), parts=["unknown"])
        assert (tier.capacity, tier.used_bytes) == (3, used)
        assert np.array_equal(_content(tier), before)

    def test_syncing_changes_nothing(self, tier: Tier) -> None:
        tier.sync()
        before = _filled(tier, 4)
        tier.sync()
        assert np.array_equal(_content(tier), before)

    def test_closing_gives_everything_back_and_may_be_repeated(self, tier: Tier) -> None:
        _filled(tier, 4)
        for _ in range(2):
            tier.close()
            assert tier.capacity == tier.used_bytes == 0

    @law
    @given(st.data())
    def test_a_read_sees_the_last_write(self, data: st.DataObject) -> None:
        layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
        model: dict[int, bytes] = {}
        with TemporaryDirectory() as folder:
            tier = self.make_tier(layout, LIMIT_BYTES, Path(folder))
            for seed in range(data.draw(st.integers(1, 8))):
                slots = data.draw(st.integers(1, 24))
                tier.resize(slots)
                model = {slot: block for slot, block in model.items() if slot < slots}
                written = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
                blocks, rows = _blocks(layout, slots, seed), _shuffled(slots, seed)[: len(written)]
                tier.write(_ids(*written), blocks, rows).wait()
                model |= {s: blocks[r].tobytes() for s, r in zip(written, rows, strict=True)}
                found = _content(tier, _ids(*model))
                assert [block.tobytes() for block in found] == list(model.values())
            tier.close()


def _ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def _shuffled(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).permutation(n).astype(np.int32)


def _blocks(layout: BlockLayout, n: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, layout.block_bytes), np.uint8)


def _bytes_of(layout: BlockLayout, part: str) -> slice:
    start = layout.offset(part)
    return slice(start, start + layout.part(part).nbytes)


def _filled(tier: Tier, slots: int) -> Bytes:
    """Give the tier so many slots and fill them; returns what they hold."""
    tier.resize(slots)
    blocks, everything = _blocks(tier.layout, slots, seed=3), np.arange(slots, dtype=np.int32)
    tier.write(everything, blocks, everything).wait()
    return blocks


def _content(tier: Tier, slots: Ids | None = None) -> Bytes:
    slots = np.arange(tier.capacity, dtype=np.int32) if slots is None else slots
    out: Bytes = np.empty((len(slots), tier.layout.block_bytes), np.uint8)
    tier.read(slots, out, np.arange(len(slots), dtype=np.int32)).wait()
    return out
