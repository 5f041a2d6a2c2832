"""One limit for slots and everything else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from tierstore.errors import CapacityError
from tierstore.memory import HostBuffer, Memory, unlimited
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from hypothesis.stateful import MultipleResults

    from tierstore.kernels.element import Array

LIMIT = 10_000


def test_what_is_taken_is_counted_by_purpose() -> None:
    memory = Memory(LIMIT)
    memory.resize_slots(4_000)
    kept = memory.take((2, 3), np.int64, "index")
    memory.take(100, np.uint8, "index")
    memory.take(50, np.float32, "staging")
    assert memory.by_purpose() == {"slots": 4_000, "index": 148, "staging": 200}
    assert (memory.used_bytes, memory.free_bytes) == (4_348, LIMIT - 4_348)
    memory.give(kept)
    assert memory.by_purpose()["index"] == 100
    assert memory.peak_bytes == 4_348


def test_arrays_come_zeroed_in_the_shape_asked_for() -> None:
    array = Memory(LIMIT).take((3, 4), np.float32, "index")
    assert array.shape == (3, 4)
    assert array.dtype == np.float32
    assert not array.any()


def test_what_does_not_fit_is_refused_with_what_is_in_the_way() -> None:
    memory = Memory(LIMIT, "dram")
    memory.take(9_000, np.uint8, "index")
    with pytest.raises(CapacityError, match=r"dram: staging needs 2\.0 KiB.*index 8\.8 KiB"):
        memory.take(2_000, np.uint8, "staging")
    with pytest.raises(CapacityError, match=r"slots of 1\.5 KiB do not fit"):
        memory.resize_slots(1_500)
    assert memory.by_purpose() == {"slots": 0, "index": 9_000}


def test_the_last_byte_can_be_taken() -> None:
    memory = Memory(LIMIT)
    memory.resize_slots(LIMIT - 1)
    memory.take(1, np.uint8, "index")
    assert memory.free_bytes == 0
    memory.take(0, np.uint8, "index")
    with pytest.raises(CapacityError):
        memory.take(1, np.uint8, "index")


def test_slots_shrink_for_other_data() -> None:
    memory, asked = Memory(LIMIT), []

    def shrink(nbytes: int) -> None:
        asked.append(nbytes)
        memory.resize_slots(memory.slot_bytes - nbytes)

    memory.on_pressure = shrink
    memory.resize_slots(9_000)
    memory.take(1_500, np.uint8, "index")
    assert asked == [500]
    assert memory.used_bytes == LIMIT


@pytest.mark.parametrize("given", [0, 400])
def test_slots_that_shrink_too_little_leave_no_room(given: int) -> None:
    memory = Memory(LIMIT)
    memory.resize_slots(9_000)
    memory.on_pressure = lambda nbytes: memory.resize_slots(9_000 - given)
    with pytest.raises(CapacityError):
        memory.take(1_500, np.uint8, "index")
    assert memory.used_bytes == 9_000 - given
    assert memory.peak_bytes == 9_000


def test_what_nothing_uses_is_lent_and_back_before_it_is_used() -> None:
    lent: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = np.zeros(shape, dtype)
        assert memory.used_bytes + array.nbytes + lent[-1] <= LIMIT
        return array

    class Slots(HostBuffer):
        def resize(self, nbytes: int) -> None:
            assert memory.used_bytes - memory.slot_bytes + nbytes + lent[-1] <= LIMIT
            super().resize(nbytes)

    memory = Memory(LIMIT, allocate=allocate, slots=Slots(LIMIT, "dram"))
    memory.lend(lent.append)
    assert lent == [LIMIT]
    memory.resize_slots(4_000)
    array = memory.take(1_000, np.uint8, "index")
    assert lent[-1] == memory.free_bytes == LIMIT - 5_000
    memory.resize_slots(1_000)
    assert lent[-1] == LIMIT - 2_000
    memory.give(array)
    assert lent[-1] == LIMIT - 1_000
    with pytest.raises(CapacityError):
        memory.take(LIMIT, np.uint8, "index")
    assert lent[-1] == LIMIT - 1_000
    memory.clear()
    assert lent[-1] == LIMIT


def test_two_threads_never_take_the_same_bytes() -> None:
    refused: list[CapacityError] = []

    def take_too() -> None:
        try:
            memory.take(60, np.uint8, "work space")
        except CapacityError as error:
            refused.append(error)

    other = threading.Thread(target=take_too)

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if other.ident is None:
            other.start()
            other.join(0.3)
        return np.zeros(shape, dtype)

    memory = Memory(100, "dram", allocate=allocate)
    memory.take(60, np.uint8, "index")
    other.join()
    assert memory.by_purpose() == {"slots": 0, "index": 60}
    assert len(refused) == 1


def test_slots_may_shrink_in_a_thread_that_takes_memory_itself() -> None:
    memory = Memory(100, "dram")
    memory.resize_slots(80)

    def shrink(nbytes: int) -> None:
        memory.resize_slots(80 - nbytes - 10)
        other = threading.Thread(target=memory.take, args=(10, np.uint8, "index"), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), "who asks for room keeps others from what they wait for"

    memory.on_pressure = shrink
    memory.take(30, np.uint8, "work space")
    assert memory.by_purpose() == {"slots": 60, "index": 10, "work space": 30}


def test_growing_keeps_the_low_corner_and_fills_the_rest() -> None:
    memory = Memory(LIMIT)
    array = memory.take((2, 3), np.int32, "directory")
    array[...] = [[1, 2, 3], [4, 5, 6]]
    array = memory.grow(array, (3, 4), "directory", fill=-1)
    assert array.tolist() == [[1, 2, 3, -1], [4, 5, 6, -1], [-1] * 4]
    assert memory.by_purpose()["directory"] == array.nbytes
    assert memory.peak_bytes == 6 * 4 + 12 * 4, "both exist while one is copied to the other"


def test_growing_beyond_the_limit_changes_nothing() -> None:
    memory = Memory(LIMIT)
    array = memory.take(6_000, np.uint8, "directory")
    with pytest.raises(CapacityError):
        memory.grow(array, (7_000,), "directory")
    assert memory.by_purpose()["directory"] == 6_000


def test_only_the_very_array_can_be_given_back() -> None:
    memory = Memory(LIMIT)
    array = memory.take(10, np.uint8, "index")
    with pytest.raises(KeyError):
        memory.give(array.copy())
    memory.give(array)
    with pytest.raises(KeyError):
        memory.give(array)
    assert memory.used_bytes == 0


def test_clearing_forgets_everything() -> None:
    memory = Memory(LIMIT)
    memory.on_pressure = lambda nbytes: None
    memory.resize_slots(5_000)
    memory.take(10, np.uint8, "index")
    memory.clear()
    assert memory.used_bytes == memory.peak_bytes == 0
    memory.resize_slots(LIMIT)
    assert memory.on_pressure is None


def test_unlimited_memory_counts_and_has_no_slots() -> None:
    memory = unlimited()
    array = memory.take(1 << 20, np.uint8, "directory")
    assert memory.used_bytes == array.nbytes
    assert memory.is_host


class MemoryMachine(RuleBasedStateMachine):
    """Arrays and slots come and go, under a limit that slots give way to."""

    arrays: Bundle[Array] = Bundle("arrays")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(LIMIT)
        self.memory.on_pressure = self.shrink
        self.memory.lend(self.borrow)
        self.held: dict[int, Array] = {}
        self.peak = 0

    def shrink(self, nbytes: int) -> None:
        if nbytes <= self.memory.slot_bytes:
            self.memory.resize_slots((self.memory.slot_bytes - nbytes) // 64 * 64)

    def borrow(self, nbytes: int) -> None:
        assert nbytes >= 0
        self.borrowed = nbytes

    def note(self, array: Array) -> Array:
        self.held[id(array)] = array
        return array

    @rule(target=arrays, size=st.integers(0, LIMIT), purpose=st.sampled_from(["index", "staging"]))
    def take(self, size: int, purpose: str) -> Array | MultipleResults[Array]:
        others = sum(array.nbytes for array in self.held.values())
        try:
            return self.note(self.memory.take(size, np.uint8, purpose))
        except CapacityError:
            assert others + size > LIMIT, "slots should have given way"
            return multiple()

    @rule(array=consumes(arrays))
    def give(self, array: Array) -> None:
        del self.held[id(array)]
        self.memory.give(array)

    @rule(target=arrays, array=consumes(arrays), more=st.integers(0, 400))
    def grow(self, array: Array, more: int) -> Array:
        array[:1] = 7
        try:
            larger = self.memory.grow(array, (len(array) + more,), "index")
        except CapacityError:
            return array
        assert np.array_equal(larger[: len(array)], array)
        assert not larger[len(array) :].any()
        del self.held[id(array)]
        return self.note(larger)

    @rule(size=st.integers(0, LIMIT + 100))
    def resize(self, size: int) -> None:
        before, others = self.memory.slot_bytes, sum(a.nbytes for a in self.held.values())
        try:
            self.memory.resize_slots(size)
        except CapacityError:
            assert others + size > LIMIT
            assert self.memory.slot_bytes == before
        else:
            assert self.memory.slot_bytes == size

    @invariant()
    def counts_are_true_and_below_the_limit(self) -> None:
        used = self.memory.slot_bytes + sum(array.nbytes for array in self.held.values())
        assert self.memory.used_bytes == used == sum(self.memory.by_purpose().values())
        assert used <= self.memory.peak_bytes <= LIMIT
        assert self.borrowed == LIMIT - used
        assert self.peak <= self.memory.peak_bytes
        self.peak = self.memory.peak_bytes


MemoryMachine.TestCase.settings = settings(stateful_step_count=30)
TestMemoryMachine = MemoryMachine.TestCase


def test_scratch_reuses_a_buffer_until_more_is_wanted() -> None:
    memory = Memory(LIMIT)
    scratch = Scratch(memory)
    first = scratch.array("scores", (10, 4), np.float32)
    again = scratch.array("scores", (40,), np.int32)
    assert np.shares_memory(first, again)
    used = memory.used_bytes
    scratch.array("scores", (4, 4), np.float32)
    assert memory.used_bytes == used
    larger = scratch.array("scores", (400,), np.float32)
    assert not np.shares_memory(first, larger)
    assert memory.by_purpose()["work space"] == memory.used_bytes


def test_scratch_buffers_of_two_names_are_apart() -> None:
    scratch = Scratch(Memory(LIMIT))
    first, second = (scratch.array(name, (8,), np.int64) for name in ("one", "two"))
    assert not np.shares_memory(first, second)


def test_scratch_that_does_not_fit_is_refused_and_can_be_tried_again() -> None:
    scratch = Scratch(Memory(LIMIT))
    scratch.array("scores", (100,), np.uint8)
    with pytest.raises(CapacityError, match="work space needs"):
        scratch.array("scores", (LIMIT + 1,), np.uint8)
    assert scratch.array("scores", (100,), np.uint8).nbytes == 100


def test_scratch_takes_no_more_than_what_is_left() -> None:
    """Room to grow is a courtesy: where only the size asked for fits, that is what it is."""
    scratch = Scratch(Memory(LIMIT))
    assert scratch.array("scores", (LIMIT,), np.uint8).nbytes == LIMIT


def test_scratch_of_no_size_is_allowed() -> None:
    assert Scratch(Memory(LIMIT)).array("ids", (0,), np.int32).shape == (0,)
