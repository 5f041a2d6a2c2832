"""What the engine keeps for one layer: segments, index, and the strip of each row.

A row is one (sequence, KV head). Its tokens stand in three places: the first few (sinks) and the
most recent ones in the row's *strip*, which is always resident and attended; all between in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierstore.interfaces import IndexContext
from tierstore.kernels import tables
from tierstore.kernels.element import is_host, stored_dtype, to_tensor
from tierstore.placement import packing_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from tierstore.adapters.attention.exact import Piece
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Bytes, Ids, Index, Pointers
    from tierstore.kernels.element import Array
    from tierstore.memory import Memory
    from tierstore.store import BlockStore

SEAL_BLOCKS = 8
"""Tokens leave the strip for blocks when so many blocks, or as many tokens as the index wants to
have together, have piled up beyond the local window."""


_STRIPS = "strip_key", "strip_value"


@dataclass(frozen=True)
class Sealed:
    """Tokens on their way from a strip to blocks: keys and values [H, n, .] of one sequence."""

    sequence: int
    keys: torch.Tensor
    values: torch.Tensor


class Layer:
    """State of one layer for a batch of sequences; row ``b * H + h`` is KV head h of sequence b."""

    def __init__(
        self,
        geometry: Geometry,
        preset: Preset,
        store: BlockStore,
        index: Index,
        memory: Memory,
        sequences: int,
    ) -> None:
        self._geometry, self._preset = geometry, preset
        self._store, self._memory = store, memory
        self.index = index
        self.heads = geometry.kv_heads
        rows = sequences * self.heads
        self.segments: Ids = store.open(rows)
        index.add_rows(self.segments)
        size = preset.block_tokens
        self._pile = max(SEAL_BLOCKS, -(-index.refresh_tokens // size)) * size
        self.strip_room = preset.sinks + preset.local + self._pile + size
        element = stored_dtype(geometry.dtype)
        self.strip_key = memory.take(
            (rows, self.strip_room, geometry.head_dim), element, "sinks and local window"
        )
        self.strip_value = memory.take(
            (rows, self.strip_room, geometry.value_size), element, "sinks and local window"
        )
        self.strip_length: Ids = np.zeros(rows, np.int32)
        self.blocks: Ids = np.zeros(rows, np.int32)

    @property
    def sequences(self) -> int:
        """Sequences in the batch."""
        return len(self.strip_length) // self.heads

    @property
    def tokens(self) -> Ids:
        """Tokens of each row, wherever they are."""
        return self.strip_length + self.blocks * np.int32(self._preset.block_tokens)

    def is_empty(self, sequences: Sequence[int]) -> bool:
        """Whether none of these sequences has a token."""
        return not self.strip_length[:: self.heads][list(sequences)].any()

    def rows(self, sequence: int) -> slice:
        """The rows of one sequence."""
        return slice(sequence * self.heads, (sequence + 1) * self.heads)

    def append_token(self, key: Array, value: Array, keep: Array) -> None:
        """Put one token [R, .] at the end of the strips of the sequences that keep it."""
        if is_host(self.strip_key):
            tables.append_tokens(
                self.strip_key, self.strip_value, self.strip_length, keep, key, value
            )
            return
        kept = np.flatnonzero(np.repeat(keep, self.heads))
        self.strip_key[kept, self.strip_length[kept]] = key[kept]
        self.strip_value[kept, self.strip_length[kept]] = value[kept]
        self.strip_length[kept] += 1

    def full_sequences(self, coming: Array) -> list[int]:
        """Sequences whose strip should hand tokens to blocks once `coming` [B] more are in it."""
        limit = self._preset.sinks + self._preset.local + self._pile
        full: list[int] = np.flatnonzero(
            self.strip_length[:: self.heads] + coming >= limit
        ).tolist()
        return full

    def strip(self, sequence: int) -> Piece:
        """Keys and values [H, n, .] that stand in the strips of one sequence."""
        rows = self.rows(sequence)
        n = int(self.strip_length[rows][0])
        return to_tensor(self.strip_key[rows, :n]), to_tensor(self.strip_value[rows, :n])

    def absorb(self, sequence: int, key: torch.Tensor, value: torch.Tensor) -> Sealed | None:
        """Take in new tokens [H, n, .] of one sequence; returns those that must go to blocks.

        Sinks and the local window stay in the strip, with the few tokens that do not fill a block.
        """
        old_key, old_value = self.strip(sequence)
        if old_key.shape[1]:
            key, value = torch.cat([old_key, key], 1), torch.cat([old_value, value], 1)
        sinks, size = self._preset.sinks, self._preset.block_tokens
        beyond = key.shape[1] - sinks - self._preset.local
        sealed = max(0, beyond // size) * size
        out = slice(sinks, sinks + sealed)
        self._set_strip(sequence, _without(key, out), _without(value, out))
        return Sealed(sequence, key[:, out], value[:, out]) if sealed else None

    def _set_strip(self, sequence: int, key: torch.Tensor, value: torch.Tensor) -> None:
        rows, n = self.rows(sequence), key.shape[1]
        to_tensor(self.strip_key[rows, :n]).copy_(key)
        to_tensor(self.strip_value[rows, :n]).copy_(value)
        self.strip_length[rows] = n

    def index_tokens(self, sealed: Sealed, context: IndexContext) -> None:
        """Enter sealed tokens into the index."""
        self.index.extend(self.rows(sealed.sequence), sealed.keys, sealed.values, context)

    def store_tokens(self, sealed: Sealed, home: Bytes | None) -> None:
        """Enter sealed tokens, which are indexed, into the block store.

        On disk, blocks of one cluster stand side by side (K18).
        """
        rows, size = self.rows(sealed.sequence), self._preset.block_tokens
        blocks = sealed.keys.shape[1] // size
        layout = self._store.layout
        per_part = (sealed.keys, sealed.values)
        pieces = [part.unflatten(1, (blocks, size)) for part in per_part]
        packed = layout.pack(dict(zip(("k", "v"), pieces, strict=True))).cpu().numpy()
        clusters = self.index.clusters(rows, int(self.blocks[rows][0]))
        self._store.append(
            self.segments[rows],
            packed,
            home=home,
            order=None if clusters is None else packing_order(clusters),
        )
        self.blocks[rows] += blocks

    def sealed(self, tokens: int) -> int:
        """Most blocks of a text of so many tokens: none of the sinks and the local window."""
        beyond = tokens - self._preset.sinks - self._preset.local
        return max(0, beyond // self._preset.block_tokens)

    def take_over(self, sequence: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Have sinks [H, n, .] and the blocks that the store has; the index is another matter."""
        rows = self.rows(sequence)
        self._set_strip(sequence, key, value)
        self.blocks[rows] = self._store.space.blocks[self.segments[rows]]

    def restore_index(self, state: Mapping[str, npt.NDArray[Any]] | None) -> None:
        """Have an index of that state, for these segments; None changes nothing."""
        if state is not None:
            own = {"segments": self.segments} if "segments" in state else {}
            self.index.restore({**state, **own})

    def rebuild_index(self, sequence: int) -> None:
        """Enter all blocks of a sequence into the index, which has none of them."""
        rows = self.rows(sequence)
        blocks = int(self.blocks[rows][0])
        if blocks:
            shape = (self.heads * blocks, self._store.layout.block_bytes)
            keys, values = self._read(sequence, 0, blocks, np.empty(shape, np.uint8))
            self.index.extend(rows, keys, values, IndexContext())

    def past(self, sequence: int, staging: Bytes) -> Iterator[Piece]:
        """All tokens of one sequence, piece by piece; each is valid until the next is asked for."""
        rows = self.rows(sequence)
        blocks, per_piece = int(self.blocks[rows][0]), len(staging) // self.heads
        for first in range(0, blocks, per_piece):
            count = min(per_piece, blocks - first)
            yield self._read(sequence, first, count, staging[: self.heads * count])
        yield self.strip(sequence)

    def _read(self, sequence: int, first: int, count: int, staging: Bytes) -> Piece:
        device, layout = self._geometry.device, self._store.layout
        out = staging.reshape(self.heads, count, layout.block_bytes)
        self._store.read(self.segments[self.rows(sequence)], first, count, out)
        parts = layout.unpack(torch.from_numpy(out).flatten(0, 1).to(device))
        return tuple(
            parts[name].unflatten(0, (self.heads, count)).flatten(1, 2) for name in ("k", "v")
        )

    def clear(self, sequence: int) -> None:
        """Forget all tokens of a sequence; its rows stay, for another one.

        CapacityError, and no change, if a block is leased; a policy's error comes when all is done.
        """
        rows = self.rows(sequence)
        segments = self.segments[rows]
        try:
            self._store.renew(segments)
        finally:
            if not self._store.space.blocks[segments].any():
                self.strip_length[rows] = self.blocks[rows] = 0
                self.index.truncate(rows, 0)

    def grown_bytes(self, sequences: int, memory: Memory) -> int:
        """Bytes of `memory` that the strips of so many more sequences take."""
        width = self._geometry.head_dim + self._geometry.value_size
        each = self.heads * self.strip_room * width * self.strip_key.itemsize
        return sequences * each if memory is self._memory else 0

    def grow(self, sequences: int) -> None:
        """Have rows for so many more sequences, after those there are, without tokens.

        After an error there may be some of them: `cut` takes them away.
        """
        rows = len(self.segments) + sequences * self.heads
        for name in _STRIPS:
            old = getattr(self, name)
            shape = (rows, *old.shape[1:])
            setattr(self, name, self._memory.grow(old, shape, "sinks and local window"))
        segments = self._store.open(rows - len(self.segments))
        none = np.zeros_like(segments)
        self.segments = np.concatenate([self.segments, segments])
        self.strip_length = np.concatenate([self.strip_length, none])
        self.blocks = np.concatenate([self.blocks, none])
        self.index.add_rows(segments)

    def cut(self, sequences: int) -> None:
        """Have no rows beyond those of the first so many sequences."""
        rows = sequences * self.heads
        self._store.drop(self.segments[rows:])
        self.segments = self.segments[:rows].copy()
        self.strip_length = self.strip_length[:rows].copy()
        self.blocks = self.blocks[:rows].copy()
        self._take_strips(np.arange(rows))
        self.index.arrange_rows(range(rows), self.segments)

    def _take_strips(self, rows: Ids | Pointers) -> None:
        """Let strip i be what strip ``rows[i]`` was."""
        for name in _STRIPS:
            old = getattr(self, name)
            new = self._memory.take(
                (len(rows), *old.shape[1:]), old.dtype, "sinks and local window"
            )
            new[...] = old[rows]
            self._memory.give(old)
            setattr(self, name, new)

    def crop(self, sequence: int, tokens: int) -> None:
        """Forget the last `tokens` tokens of a sequence; its local window fills up from blocks."""
        rows, size, sinks = self.rows(sequence), self._preset.block_tokens, self._preset.sinks
        have_blocks, strip = int(self.blocks[rows][0]), int(self.strip_length[rows][0])
        left = strip + have_blocks * size - tokens
        wanted = min(left, sinks + self._preset.local)
        back = min(have_blocks, max(0, -(-(wanted - (strip - tokens)) // size)))
        key, value = self.strip(sequence)
        if back:
            staging: Bytes = np.empty((self.heads * back, self._store.layout.block_bytes), np.uint8)
            block_key, block_value = self._read(sequence, have_blocks - back, back, staging)
            key = torch.cat([key[:, :sinks], block_key, key[:, sinks:]], 1)
            value = torch.cat([value[:, :sinks], block_value, value[:, sinks:]], 1)
            self._store.truncate(self.segments[rows], have_blocks - back)
            self.index.truncate(rows, have_blocks - back)
            self.blocks[rows] -= back
        stay = key.shape[1] - tokens
        self._set_strip(sequence, key[:, :stay].clone(), value[:, :stay].clone())

    def arrange(self, sources: Sequence[int]) -> None:
        """Let sequence i be what sequence ``sources[i]`` was; those not named are dropped."""
        rows = (np.array(sources, np.int64)[:, None] * self.heads + np.arange(self.heads)).ravel()
        segments = self.segments[rows]
        first = np.unique(rows, return_index=True)[1]
        copies = np.setdiff1d(np.arange(len(rows)), first)
        segments[copies] = self._store.open(len(copies))
        self._store.duplicate(self.segments[rows][copies], segments[copies])
        self._store.drop(np.delete(self.segments, np.unique(rows)))
        self.segments = segments
        self.index.arrange_rows(rows.tolist(), segments)
        self._take_strips(rows)
        self.strip_length = self.strip_length[rows]
        self.blocks = self.blocks[rows]


def _without(tokens: torch.Tensor, out: slice) -> torch.Tensor:
    return torch.cat([tokens[:, : out.start], tokens[:, out.stop :]], 1)
