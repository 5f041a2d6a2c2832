"""Stored arrays and tensors of values are two views of the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierstore.kernels.element import SUPPORTED, stored_dtype, to_array, to_tensor


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_array_and_tensor_share_memory_both_ways(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)

    array = to_array(tensor)
    back = to_tensor(array)
    back[1, 2] = 42

    assert array.dtype == stored_dtype(dtype)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr() == array.ctypes.data
    assert tensor[1, 2] == 42


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_strided_views_keep_their_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).to(dtype).reshape(2, 3, 4).transpose(0, 1)[:, :, 1:3]

    array = to_array(tensor)

    assert array.shape == (3, 2, 2)
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.equal(to_tensor(array), tensor)


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_tensor_that_wants_a_gradient_is_taken_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype, requires_grad=True)

    assert to_array(tensor).ctypes.data == tensor.data_ptr()


def test_other_arrays_become_tensors_of_their_own_type() -> None:
    assert to_tensor(np.zeros(2, np.int32)).dtype == torch.int32
    assert to_tensor(np.zeros(2, np.uint8)).dtype == torch.uint8
