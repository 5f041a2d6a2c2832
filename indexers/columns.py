"""Arrays that grow with an index: declared once, then grown, copied, saved and charged alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import CapacityError
from tierstore.kernels.element import is_host, to_array, to_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from tierstore.kernels.element import Array
    from tierstore.memory import Memory


@dataclass(frozen=True)
class Column:
    """One array of an index: a place of `shape` for each unit, page, block or row.

    per: what it has a place for: ``"unit"``, ``"page"``, ``"block"`` or ``"row"``.
    dtype: of its elements; 16 bits unsigned stand for bfloat16 and signed ones for float16, as in
        `tierstore.kernels.element`.
    on_host: whether it is a list that the host works on, whatever device the index is on.
    together: how many units, pages or blocks share a place of `shape`.
    """

    per: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    on_host: bool = False
    together: int = 1


class Columns:
    """The arrays of an index, [rows, places, ...] or, with one place for each row, [rows, ...].

    Places are added by an eighth of what there is, so that appending costs the same at any length.
    """

    def __init__(self, columns: Mapping[str, Column], device: Memory, host: Memory) -> None:
        self._columns = dict(columns)
        self._device, self._host = device, host
        self._rows = 0
        self._places = dict.fromkeys(("unit", "page", "block"), 0)
        self._steps = {
            kind: max((c.together for c in columns.values() if c.per == kind), default=1)
            for kind in self._places
        }
        self._arrays: dict[str, Array] = {}
        for name, column in self._columns.items():
            self._arrays[name] = self._memory(name).take(
                self._shape(column), np.dtype(column.dtype), "index"
            )

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    @property
    def nbytes(self) -> int:
        """Bytes that all arrays occupy."""
        return sum(array.nbytes for array in self._arrays.values())

    def places(self, kind: str) -> int:
        """Places that each row has room for."""
        return self._places[kind]

    def part(self, rows: slice) -> Columns:
        """Some of the rows, to look at."""
        return _ColumnsOfRows(self, rows)

    def reserve(self, rows: int = 0, **places: int) -> None:
        """Have room for so many rows and, in each, for ``unit=``, ``page=`` and ``block=``.

        After a CapacityError there is room for what there was room for.
        """
        before = self._rows, self._places
        self._rows = max(rows, self._rows)
        self._places = before[1] | {kind: self._grown(kind, n) for kind, n in places.items()}
        if (self._rows, self._places) == before:
            return
        try:
            for name, column in self._columns.items():
                shape = self._shape(column)
                self._arrays[name] = self._memory(name).grow(self._arrays[name], shape, "index")
        except CapacityError:
            self._rows, self._places = before
            raise

    def grown_bytes(self, memory: Memory, rows: int, **places: int) -> int:
        """Bytes of `memory` that `reserve` would make of the arrays there."""
        before = self._rows, self._places
        self._rows = max(rows, self._rows)
        self._places = {kind: self._grown(kind, places.get(kind, 0)) for kind in before[1]}
        shapes = {name: self._shape(column) for name, column in self._columns.items()}
        self._rows, self._places = before
        return sum(
            math.prod(shape) * self._arrays[name].itemsize
            for name, shape in shapes.items()
            if self._memory(name) is memory
        )

    def _grown(self, kind: str, wanted: int) -> int:
        """Places of a kind for each row, once there is room for `wanted`."""
        have, step = self._places[kind], self._steps[kind]
        return have if wanted <= have else -(-max(wanted, have + have // 8) // step) * step

    def widen(self, name: str, dtype: npt.DTypeLike) -> None:
        """Let a column have elements of a wider type from now on."""
        if self._arrays[name].dtype != dtype:
            self._replace(name, self._arrays[name].astype(dtype))

    def arrange(self, rows: Sequence[int]) -> None:
        """Let new row i be a copy of row ``rows[i]``."""
        chosen = list(rows)
        self._rows = len(chosen)
        for name, old in self._arrays.items():
            self._replace(name, old[chosen] if len(old) else old)

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of all arrays on the host."""
        return {
            name: array.copy() if is_host(array) else to_array(to_tensor(array).cpu())
            for name, array in self._arrays.items()
        }

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take over arrays that `state` gave."""
        for name, column in self._columns.items():
            content = state[name]
            self._replace(name, content)
            self._rows = len(content)
            if column.per != "row":
                self._places[column.per] = content.shape[1] * column.together

    def _shape(self, column: Column) -> tuple[int, ...]:
        if column.per == "row":
            return (self._rows, *column.shape)
        places = (self._places[column.per] // column.together,)
        return (self._rows, *places, *column.shape)

    def _memory(self, name: str) -> Memory:
        return self._host if self._columns[name].on_host else self._device

    def _replace(self, name: str, content: Array) -> None:
        memory = self._memory(name)
        array = memory.take(content.shape, content.dtype, "index")
        if is_host(array):
            array[...] = content
        else:
            to_tensor(array).copy_(to_tensor(content))
        memory.give(self._arrays[name])
        self._arrays[name] = array
        self._columns[name] = replace(self._columns[name], dtype=content.dtype)


class _ColumnsOfRows(Columns):
    """What other columns have for some rows, also when they grow."""

    def __init__(self, whole: Columns, rows: slice) -> None:
        self._whole, self._chosen = whole, rows

    def __getitem__(self, name: str) -> Array:
        return self._whole[name][self._chosen]

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    def places(self, kind: str) -> int:
        return self._whole.places(kind)
