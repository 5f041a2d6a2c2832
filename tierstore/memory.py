"""One limit for everything that a memory tier's capacity must cover.

A tier's slots share their limit with index arrays, sinks, local windows, staging, directory tables
and policy state. Each is charged byte for byte before it exists; when an array does not fit, the
slots shrink.
"""

from __future__ import annotations

import math
import mmap
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import CapacityError
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.interfaces import Bytes
    from tierstore.kernels.element import Array


class SlotBuffer(Protocol):
    """Where slots are: `array` has at least as many bytes as the last `resize` asked for."""

    array: Bytes

    def resize(self, nbytes: int) -> None:
        """Have room for `nbytes`, keeping what fits and freeing the rest."""


class HostBuffer:
    """Slots in host memory: address space for the whole limit, pages only for what is in use.

    CapacityError if the machine does not have so much.
    """

    def __init__(self, limit_bytes: int, name: str) -> None:
        try:
            # Shared pages, the default, would stay occupied when they are handed back.
            self._map = mmap.mmap(-1, limit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"{name}: this machine does not give a process {format_size(limit_bytes)}: "
                "lower the limit"
            ) from error
        self.array: Bytes = np.frombuffer(self._map, np.uint8)
        self.is_locked = False
        """Whether a device knows the pages by their place in memory, so that none may go."""

    def resize(self, nbytes: int) -> None:
        """Ask for large pages up to `nbytes`, and hand those beyond back to the system."""
        whole = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            # First touches cost a fault per page; only pages that the slots fill may be large.
            self._map.madvise(mmap.MADV_HUGEPAGE, 0, whole)
        start = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < len(self._map) and not self.is_locked:
            beyond = (start, len(self._map) - start)
            self._map.madvise(mmap.MADV_DONTNEED, *beyond)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                self._map.madvise(mmap.MADV_NOHUGEPAGE, *beyond)


class Memory:
    """A limit in bytes, what it is spent on, and the buffer of the slots.

    Invariant: `used_bytes` never exceeds `limit_bytes`. Any thread may take and give. The lock is
    innermost but for the borrower's own: `on_pressure` is called without it.

    Parameters
    ----------
    allocate: makes a zeroed array of a shape and dtype where this memory is.
    slots: the buffer for slots; host memory by default.
    """

    def __init__(
        self,
        limit_bytes: int,
        name: str = "memory",
        *,
        allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.zeros,
        slots: SlotBuffer | None = None,
    ) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.slot_bytes = 0
        self.peak_bytes = 0
        self.on_pressure: Callable[[int], None] | None = None
        """Asked to shrink the slots by so many bytes when an array does not fit, if it can."""
        self._borrow: Callable[[int], None] | None = None
        self._allocate = allocate
        self._slots: SlotBuffer = HostBuffer(limit_bytes, name) if slots is None else slots
        self._taken: dict[int, tuple[Array, str]] = {}
        self._taken_bytes = 0
        self._lock = threading.RLock()

    @property
    def is_host(self) -> bool:
        """Whether arrays are NumPy arrays."""
        return isinstance(self.slots, np.ndarray)

    @property
    def slots(self) -> Bytes:
        """The slots' bytes; those below `slot_bytes` are in use."""
        return self._slots.array

    @property
    def used_bytes(self) -> int:
        """Bytes in slots and taken arrays."""
        return self.slot_bytes + self._taken_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing uses."""
        return self.limit_bytes - self.used_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest taken array: growing it takes as much again for a while."""
        with self._lock:
            return max((array.nbytes for array, _ in self._taken.values()), default=0)

    def by_purpose(self) -> dict[str, int]:
        """Bytes used for each purpose, slots included."""
        with self._lock:
            total = {"slots": self.slot_bytes}
            for array, purpose in self._taken.values():
                total[purpose] = total.get(purpose, 0) + array.nbytes
            return total

    def resize_slots(self, nbytes: int) -> None:
        """Have `nbytes` bytes of slots; CapacityError, and no change, if they do not fit."""
        with self._lock:
            if nbytes - self.slot_bytes > self.free_bytes:
                raise CapacityError(
                    f"{self.name}: slots of {format_size(nbytes)} do not fit beside "
                    f"{format_size(self._taken_bytes)} of other data in a limit of "
                    f"{format_size(self.limit_bytes)}: raise the limit"
                )
            self._tell_borrower(nbytes - self.slot_bytes)
            self._slots.resize(nbytes)
            self.slot_bytes = nbytes
            self._note_use()

    def take(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, purpose: str) -> Array:
        """A zeroed array inside the limit; CapacityError if even fewer slots leave no room."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.free_bytes and self.on_pressure is not None:
            self.on_pressure(nbytes - self.free_bytes)
        with self._lock:
            if nbytes > self.free_bytes:
                spent = [f"{use} {format_size(size)}" for use, size in self.by_purpose().items()]
                raise CapacityError(
                    f"{self.name}: {purpose} needs {format_size(nbytes)}, but only "
                    f"{format_size(self.free_bytes)} of {format_size(self.limit_bytes)} is left "
                    f"({', '.join(spent)}): raise {self.name}= or lower the budget"
                )
            self._tell_borrower(nbytes)
            array = self._allocate(shape, dtype)
            self._taken[id(array)] = (array, purpose)
            self._taken_bytes += nbytes
            self._note_use()
            return array

    def give(self, array: Array) -> None:
        """Return an array from `take`, which must be that very object."""
        with self._lock:
            del self._taken[id(array)]
            self._taken_bytes -= array.nbytes
            self._note_use()

    def grow(self, array: Array, shape: tuple[int, ...], purpose: str, fill: float = 0) -> Array:
        """`array` with at least that shape: in the low corner of a larger one, `fill` elsewhere."""
        shape = tuple(map(max, shape, array.shape))
        if shape == array.shape:
            return array
        larger = self.take(shape, array.dtype, purpose)
        if fill:
            larger.fill(fill)
        larger[tuple(slice(extent) for extent in array.shape)] = array
        self.give(array)
        return larger

    def clear(self) -> None:
        """Forget everything; arrays taken before must no longer be used."""
        with self._lock:
            self._taken.clear()
            self._taken_bytes = self.slot_bytes = self.peak_bytes = 0
            self._slots.resize(0)
            self.on_pressure = None
            self._note_use()

    def lend(self, borrow: Callable[[int], None]) -> None:
        """Let somebody have the bytes that nothing uses: `borrow` is told how many these are.

        It is told before they become fewer, and has given back the rest when it returns.
        """
        with self._lock:
            self._borrow = borrow
            self._note_use()

    def _tell_borrower(self, wanted: int) -> None:
        """So many bytes are to be used beyond those that are; negative for fewer."""
        if self._borrow is not None and wanted > 0:
            self._borrow(self.free_bytes - wanted)

    def _note_use(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._borrow is not None:
            self._borrow(self.free_bytes)


def unlimited(name: str = "metadata") -> Memory:
    """Memory that is counted but not bounded, for stores without a memory tier; it has no slots."""
    memory = Memory(mmap.PAGESIZE, name)
    memory.limit_bytes = 1 << 62
    return memory
