"""How KV elements look as arrays: NumPy has no bfloat16, so 16-bit floats travel as bit patterns.

======== =============== ===============
torch    array type      meaning
======== =============== ===============
float32  ``float32``     itself
bfloat16 ``uint16``      its bit pattern
float16  ``int16``       its bit pattern
======== =============== ===============
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_STORED: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    torch.float32: (torch.float32, np.dtype(np.float32)),
    torch.bfloat16: (torch.uint16, np.dtype(np.uint16)),
    torch.float16: (torch.int16, np.dtype(np.int16)),
}
_VALUE = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.int16): torch.float16}

SUPPORTED = tuple(_STORED)


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The array type that holds elements of `dtype` (float32, bfloat16 or float16)."""
    return _STORED[dtype][1]


def is_host(array: object) -> bool:
    """Whether `array` is NumPy's, that is, in host memory."""
    return isinstance(array, np.ndarray)


def to_array(tensor: torch.Tensor) -> Array:
    """The elements of a tensor as an array that shares its memory: NumPy's, or CuPy's on a GPU.

    Tensors of other types than elements' are arrays of their own type.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    pattern, dtype = _STORED.get(tensor.dtype, (tensor.dtype, None))
    if tensor.device.type == "cpu":
        return tensor.view(pattern).numpy()
    import cupy

    bits = tensor.view(torch.int16) if pattern == torch.uint16 else tensor.view(pattern)
    array: Array = cupy.from_dlpack(bits)
    return array if dtype is None else array.view(dtype)


def to_tensor(array: Array) -> torch.Tensor:
    """A tensor of values that shares memory with a stored array (NumPy, or CuPy by DLPack)."""
    tensor = torch.from_numpy(array) if is_host(array) else torch.utils.dlpack.from_dlpack(array)
    value = _VALUE.get(np.dtype(array.dtype.name))
    return tensor if value is None else tensor.view(value)
