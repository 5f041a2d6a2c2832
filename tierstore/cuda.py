"""Copies to a GPU that its copy engine makes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierstore.arrays import cupy
from tierstore.tiers.pinned import forget_error

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Completion, Ids
    from tierstore.kernels.element import Array


class CudaCopies:
    """Sends blocks on a stream of its own, and has the GPU put them into their rows.

    What reads or writes these rows before must be on the current stream, torch's or CuPy's, of the
    thread that calls `begin`, or on the default stream, if that thread has chosen no other.
    Not yet run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._xp, self._device = cupy(), device.index or 0
        self._locked: set[int] = set()
        with self._xp.cuda.Device(self._device):
            self._stream = self._xp.cuda.Stream(non_blocking=True)
        self._to_torch = torch.cuda.ExternalStream(self._stream.ptr, self._device)

    def lock(self, pages: Bytes) -> None:
        address = pages.ctypes.data
        if int(torch.cuda.cudart().cudaHostRegister(address, pages.nbytes, 0)) == 0:
            self._locked.add(address)
        else:
            forget_error()

    def unlock(self, pages: Bytes) -> None:
        address = pages.ctypes.data
        if address in self._locked:
            self._locked.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)

    def begin(self, blocks: Bytes, out: Array, rows: Ids, start: int, stop: int) -> Completion:
        xp = self._xp
        with xp.cuda.Device(self._device):
            # Attention that still reads these rows was issued on one of the caller's streams.
            self._stream.wait_event(xp.cuda.get_current_stream().record())
            self._to_torch.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with self._stream:
                    arrived = xp.empty(blocks.shape, xp.uint8)
                    arrived.set(blocks, self._stream)
                    out[xp.asarray(rows), start:stop] = arrived[:, start:stop]
                    return _Event(self._stream.record())
            except BaseException:
                self._stream.synchronize()
                raise


class _Event:
    def __init__(self, event: Any) -> None:  # noqa: ANN401 (CuPy has no types)
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
