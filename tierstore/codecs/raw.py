"""Bytes as they are."""

import numpy as np

from tierstore.errors import CorruptBlockError
from tierstore.interfaces import Bytes, Codec


class RawCodec(Codec):
    """Stores the bytes unchanged."""

    name = "raw"
    code = 0
    is_lossless = True

    def encode(self, blocks: Bytes) -> Bytes:
        return np.ascontiguousarray(blocks).reshape(-1)

    def decode(self, stored: Bytes, out: Bytes) -> None:
        if stored.nbytes != out.nbytes:
            raise CorruptBlockError(f"raw extent has {stored.nbytes} bytes: expected {out.nbytes}")
        out[...] = stored.reshape(out.shape)

    def bound(self, nbytes: int) -> int:
        return nbytes
