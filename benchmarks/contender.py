"""What is asked of every store that takes part in the store benchmark."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from tierstore.aligned import aligned_rows

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Bytes

Value = bytes | memoryview
Look = Callable[[Sequence[Value | None]], None]
"""Is shown values that lie in no buffer of the caller's, while they may be read; None: a miss."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A caller's buffer of one row for each value.

    Attributes
    ----------
    array: [rows, value bytes].
    singles: the same memory row by row, each [1, value bytes].
    views: the same memory row by row.
    """

    array: Bytes
    singles: list[Bytes]
    views: list[memoryview]

    @classmethod
    def of(cls, count: int, size: int) -> Self:
        """A buffer that begins at a page, and whose pages are there already."""
        array = aligned_rows(count, size)
        array.fill(1)
        singles = [array[row : row + 1] for row in range(count)]
        return cls(array, singles, [row.data for row in array])


Get = Callable[[Sequence[bytes], Rows, Look], None]
"""Gets the values of some keys: into the first rows, or else shown to the `Look`."""

Put = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Puts values of as many keys; in a durable store they survive a power loss when it returns."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a store may take.

    Attributes
    ----------
    folder: of its own; made when the store is.
    capacity: bytes of values that it has to hold.
    memory: bytes that it may cache; 0 for no cache of its own.
    is_durable: whether what is put survives a power loss, rather than just the end of the process.
    """

    folder: Path
    capacity: int
    memory: int = 0
    is_durable: bool = False


class Contender(ABC):
    """A store, opened. One thread uses it.

    The forms of a call have names that continue the name of the store: those without ``batch`` make
    one call for each key, those with ``bytes`` return new objects, and those with ``view`` show the
    store's own memory, with nothing copied.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    """What has to be installed."""

    about: ClassVar[str]
    """What a reader of its figures has to know."""

    @abstractmethod
    def __init__(self, room: Room) -> None:
        """Open what lies in the room's folder, or make it."""

    @classmethod
    def takes_part(cls, block: int, is_durable: bool) -> bool:
        """Whether it has something of its own to show for values of `block` bytes."""
        return True

    @abstractmethod
    def gets(self) -> Mapping[str, Get]:
        """Forms of reading; one without ``bytes`` and ``view`` fills the rows."""

    @abstractmethod
    def puts(self) -> Mapping[str, Put]:
        """Forms of writing."""

    def settle(self) -> None:
        """Return when all work in the background is done, so that it disturbs nobody's turn."""
        os.sync()

    def report(self) -> dict[str, object]:
        """Plain data that tell how it came to its figures."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Leave the files for another one to open."""


def is_filling(form: str) -> bool:
    """Whether a form of reading fills the rows."""
    return not {"bytes", "view"} & set(form.split())
