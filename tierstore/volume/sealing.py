"""Values on their way to disk: their rows, and what binds these to their places and payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.volume.format import (
    DEAD,
    LIVE,
    ROW,
    ROW_BYTES,
    KeyFields,
    payload_checksum,
    row_check,
)
from tierstore.volume.segment import stored_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.volume.files import Run

_STATE_AT = ROW.fields["state"][1] if ROW.fields else 0


@dataclass(slots=True)
class Stored:
    """Values as they are on disk: the bytes of each, how long each was before, and by which codec.

    valid: uint32, blocks that each holds; 0 where that means nothing. least_bytes: room that each
    takes at least. sequences: of values that only move; others get the next ones.
    """

    pieces: Sequence[memoryview]
    value_bytes: Sequence[int]
    codec: int
    valid: Sequence[int] | None = None
    least_bytes: int = 0
    sequences: Sequence[int] | None = None


def rows_of(keys: KeyFields, stored: Stored, first: int) -> npt.NDArray[np.void]:
    """Rows that describe values, but for their places and checksums."""
    n = len(keys)
    rows = np.zeros(n, ROW)
    rows["sequence"] = np.arange(first, first + n, dtype=np.uint64)
    if stored.sequences is not None:
        rows["sequence"] = stored.sequences
    rows["stored_bytes"] = [piece.nbytes for piece in stored.pieces]
    rows["value_bytes"] = stored.value_bytes
    rows["key_bytes"] = keys.lengths
    rows["codec"], rows["state"] = stored.codec, LIVE
    rows["valid"] = 0 if stored.valid is None else stored.valid
    rows.view(np.uint64).reshape(n, -1)[:, 5:11] = keys.fields
    return rows


def sealed_rows(
    rows: npt.NDArray[np.void], pieces: list[list[memoryview]], runs: list[Run]
) -> npt.NDArray[np.void]:
    """Rows bound to their places and payloads; those in no run are empty."""
    whole = rows.tobytes()
    done = [bytes(ROW_BYTES)] * len(rows)
    for segment, first, positions in runs:
        for place, i in enumerate(positions, first):
            binding = segment.binding(place)
            row = whole[i * ROW_BYTES : (i + 1) * ROW_BYTES]
            checksum = payload_checksum(stored_digest(pieces[i]), row, binding)
            done[i] = sealed(row[:8] + checksum + row[24:], binding)
    return np.frombuffer(b"".join(done), ROW)


def sealed(row: bytes, binding: bytes) -> bytes:
    """A row with its check."""
    return row[:-8] + row_check(row, binding).to_bytes(8, "little")


def dead_row(row: np.void, binding: bytes) -> bytes:
    """The row of a live value as it is once that is gone."""
    dead = bytearray(row.tobytes())
    dead[_STATE_AT] = DEAD
    return sealed(bytes(dead), binding)
