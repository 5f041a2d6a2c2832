"""Arrays where Triton's kernels run: on a GPU, or under its interpreter in memory that plays one.

Triton decides at import whether it interprets, so that suites that use this run in a process of
their own (`tests/kernels/test_triton.py`), or on a machine with a GPU.
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from tierstore.arrays import as_array
from tierstore.kernels.element import Array, to_tensor

if TYPE_CHECKING:
    from types import EllipsisType

    import numpy.typing as npt
    from oracles import Stored

Key: TypeAlias = "int | slice | EllipsisType | tuple[int | slice, ...] | list[int]"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MARKS = [
    # The interpreter computes in NumPy, which warns of what devices do silently: log(0) is -inf.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
    if INTERPRETED
    else pytest.mark.gpu
]

seeds = st.integers(0, 2**32 - 1)


def examples(count: int) -> settings:
    """So many under the interpreter, which takes 20 ms for each program: too slow to shrink."""
    if not INTERPRETED:
        return settings(max_examples=20 * count, deadline=None)
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=count, deadline=None, phases=phases, derandomize=True)


few = examples(2)


class DeviceArray:
    """What the package uses of a CuPy array, in memory of the host.

    NumPy's functions and Numba's kernels do not take it; torch does, by DLPack.
    """

    def __init__(self, array: Stored) -> None:
        self._array: Any = array

    shape = property(operator.attrgetter("_array.shape"))
    dtype = property(operator.attrgetter("_array.dtype"))
    itemsize = property(operator.attrgetter("_array.itemsize"))
    nbytes = property(operator.attrgetter("_array.nbytes"))

    def __len__(self) -> int:
        return len(self._array)

    def __int__(self) -> int:
        return int(self._array)

    def __getitem__(self, key: Key) -> DeviceArray:
        return DeviceArray(self._array[key])

    def __setitem__(self, key: Key, value: DeviceArray | Stored | float) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError("an array of the host does not go to a device by itself")
        self._array[key] = value.get() if isinstance(value, DeviceArray) else value

    def __array__(self, *_: object, **__: object) -> Stored:
        raise TypeError("an array on a device does not become NumPy's by itself")

    def __dlpack__(self, **options: object) -> object:
        exported: object = self._array.__dlpack__(**options)
        return exported

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device

    def get(self) -> Stored:
        array: Stored = self._array
        return array

    def view(self, dtype: npt.DTypeLike) -> DeviceArray:
        return DeviceArray(self._array.view(dtype))

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self._array.reshape(shape))


def there(array: Stored) -> Array:
    """An array where the kernels run, sharing memory if that is here."""
    if INTERPRETED:
        return cast("Array", DeviceArray(array))
    values = torch.from_numpy(array) if array.dtype != np.uint16 else to_tensor(array)
    device = as_array(values.cuda())
    return device.view(array.dtype) if device.dtype != array.dtype else device


def back(array: Array) -> Array:
    host: Array = array.get()  # type: ignore[attr-defined]
    return host
