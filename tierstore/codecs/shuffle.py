"""Byte planes and zstd: lossless, and never longer than one byte more than the blocks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from tierstore.errors import ConfigError, CorruptBlockError
from tierstore.interfaces import Codec

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes

RAW = 0
ELEMENT_BYTES = (1, 2, 4, 8)


class ShuffleZstdCodec(Codec):
    """Separates the bytes of elements into planes and compresses those with zstd.

    The high bytes of nearby floats are alike, so that planes compress where elements do not.

    Stored: one byte 0 and the blocks as they are, if compressing gains less than `least_gain` of
    them; else one byte with the element size, and a zstd frame that states its content's length.
    A frame is opened only if that length is right and it needs no dictionary, so that damaged or
    hostile bytes cannot claim memory.

    Parameters
    ----------
    element_bytes: 1 (no planes), 2, 4 or 8; what is stored can be read with any.
    level: of zstd, 1 to 22.
    least_gain: a share of the blocks' bytes, 0 <= least_gain < 1.
    """

    name = "shuffle+zstd"
    code = 1
    is_lossless = True

    def __init__(self, element_bytes: int = 2, *, level: int = 1, least_gain: float = 0.05) -> None:
        if element_bytes not in ELEMENT_BYTES:
            raise ConfigError(
                f"element_bytes={element_bytes!r} in codec {self.name!r}: expected one of"
                f" {list(ELEMENT_BYTES)}"
            )
        if level not in range(1, 23):
            raise ConfigError(f"level={level!r} in codec {self.name!r}: expected 1 to 22")
        if not 0 <= least_gain < 1:
            raise ConfigError(
                f"least_gain={least_gain!r} in codec {self.name!r}: expected 0 <= least_gain < 1"
            )
        self._element_bytes, self._level, self._least_gain = element_bytes, level, least_gain
        self._own = threading.local()  # A zstd context serves one thread at a time.

    def encode(self, blocks: Bytes) -> Bytes:
        flat = np.ascontiguousarray(blocks).reshape(-1)
        longest = int(flat.nbytes * (1 - self._least_gain)) - 1
        frame = b""
        if longest > 0:
            frame = self._compressed(flat)
        is_raw = not 0 < len(frame) <= longest
        body = flat if is_raw else np.frombuffer(frame, np.uint8)
        stored = np.empty(1 + body.nbytes, np.uint8)
        stored[0], stored[1:] = RAW if is_raw else self._element_bytes, body
        return stored

    def decode(self, stored: Bytes, out: Bytes) -> None:
        mark = int(stored[0]) if stored.size else None
        if mark == RAW:
            if stored.nbytes != 1 + out.nbytes:
                raise CorruptBlockError(
                    f"raw extent has {stored.nbytes - 1} bytes: expected {out.nbytes}"
                )
            out[...] = stored[1:].reshape(out.shape)
            return
        if mark not in ELEMENT_BYTES:
            raise CorruptBlockError(
                f"{self.name} extent begins with {mark}: expected one of {[RAW, *ELEMENT_BYTES]}"
            )
        planes = self._planes(np.ascontiguousarray(stored[1:]), out.nbytes)
        if out.flags.c_contiguous:
            _join(planes, mark, out.reshape(-1))
            return
        flat = np.empty(out.nbytes, np.uint8)
        _join(planes, mark, flat)
        out[...] = flat.reshape(out.shape)

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    def _compressed(self, flat: Bytes) -> bytes:
        """A frame of all first bytes of elements, all second ones, ..., and what is left over."""
        size = self._element_bytes
        whole = flat.nbytes // size * size
        stream = self._compressor().compressobj(size=flat.nbytes)
        pieces = []
        for i in range(size):
            pieces.append(stream.compress(np.ascontiguousarray(flat[i:whole:size]).data))
            # Each plane has its own code: together they compress less and decode slower.
            pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        pieces.append(stream.compress(flat[whole:].data))
        pieces.append(stream.flush())
        return b"".join(pieces)

    def _planes(self, frame: Bytes, nbytes: int) -> Bytes:
        """The frame's content, which is `nbytes` long."""
        try:
            found = zstandard.get_frame_parameters(frame.data)
        except zstandard.ZstdError as error:
            raise CorruptBlockError(f"{self.name} extent has no zstd frame: {error}") from error
        # The frame's own length bounds what zstd allocates, and its `max_output_size` does not.
        if found.content_size != nbytes or not nbytes:
            raise CorruptBlockError(
                f"{self.name} frame states {found.content_size} bytes: expected {nbytes}"
            )
        if found.dict_id:
            raise CorruptBlockError(
                f"{self.name} frame needs dictionary {found.dict_id}: expected a frame without"
            )
        try:
            content = self._decompressor().decompress(frame.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptBlockError(f"{self.name} frame is damaged: {error}") from error
        return np.frombuffer(content, np.uint8)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._own, "compressor"):
            self._own.compressor = zstandard.ZstdCompressor(
                level=self._level, write_content_size=True, write_checksum=False
            )
        compressor: zstandard.ZstdCompressor = self._own.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._own.decompressor
        return decompressor


def _join(planes: Bytes, size: int, out: Bytes) -> None:
    whole = out.nbytes // size * size
    # Strided copies of one plane each are five times as fast as a transposed one.
    for i, plane in enumerate(planes[:whole].reshape(size, -1)):
        out[i:whole:size] = plane
    out[whole:] = planes[whole:]
