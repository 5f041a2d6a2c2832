"""What `GatherFromHost` refuses and launches, with a stand-in for CuPy, and itself on a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from tierstore.arrays import cupy
from tierstore.kernels.cuda import GatherFromHost

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

Launches = list[tuple[Any, ...]]


def stand_in(launches: Launches) -> ModuleType:
    module = SimpleNamespace(get_function=lambda name: lambda *args: launches.append((name, *args)))
    device = SimpleNamespace(attributes={"MultiProcessorCount": 2})
    xp = ModuleType("cupy")
    xp.RawModule = lambda code, backend: module  # type: ignore[attr-defined]
    xp.cuda = SimpleNamespace(Device=lambda: device)  # type: ignore[attr-defined]
    return xp


def output(nbytes: int, address: int = 4096) -> Array:
    """What the gathering looks at of a CuPy array."""
    return cast("Array", SimpleNamespace(nbytes=nbytes, data=SimpleNamespace(ptr=address)))


@pytest.mark.parametrize(("block", "out"), [(24, output(96)), (0, output(96)), (16, output(96, 8))])
def test_what_is_not_in_words_is_refused(block: int, out: Array) -> None:
    launches: Launches = []
    with pytest.raises(ValueError, match="expected multiples of 16"):
        GatherFromHost(stand_in(launches))(np.zeros(2, np.uint64), block, out)
    assert not launches


def test_too_small_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 96 for 2 blocks of 48"):
        GatherFromHost(stand_in([]))(np.zeros(2, np.uint64), 48, output(80))


def test_one_launch_copies_all_blocks_and_none_copies_nothing() -> None:
    launches: Launches = []
    gather = GatherFromHost(stand_in(launches))

    gather(np.zeros(0, np.uint64), 48, output(0))
    gather(np.zeros(100_000, np.uint64), 2048, output(204_800_000))

    ((name, grid, threads, arguments),) = launches
    assert (name, grid, threads) == ("gather_blocks", (8,), (256,))
    assert (arguments[1], arguments[2]) == (100_000, 2048)


@pytest.mark.gpu
def test_blocks_arrive_from_pinned_memory() -> None:
    xp = cupy()
    host = torch.randint(0, 256, (50, 80), dtype=torch.uint8).pin_memory()
    picked = torch.randperm(50)[:17]
    addresses = xp.asarray((host.data_ptr() + picked.numpy() * 80).astype(np.uint64))
    out = xp.zeros((17, 80), np.uint8)

    GatherFromHost(xp)(addresses, 80, out)

    np.testing.assert_array_equal(out.get(), host[picked].numpy())
