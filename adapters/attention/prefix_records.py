"""What is kept of a prompt: sinks, blocks piece by piece, and the indexes at its end.

Everything has a key that depends on all tokens up to its end, on the model, and on how blocks are
cut; so prompts share the pieces that they have in common, and nothing else is ever found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierstore.chain import token_ids
from tierstore.packing import pack_arrays, unpack_arrays
from tierstore.prefix import PrefixCache
from tierstore.saving import SavedRun, group_extra, save_segments, segment_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from tierstore.adapters.attention.exact import Piece
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.rules import Rules
    from tierstore.chain import Chain, TokenIds, Tokens
    from tierstore.interfaces import Bytes, Ids
    from tierstore.keyed import KeyedStore
    from tierstore.layout import BlockLayout
    from tierstore.store import BlockStore

State = dict[str, "npt.NDArray[Any]"]
"""Arrays of an index, each with the rows of one sequence first; but ``kind``, which is one text."""

_VERSION = 1
_PIECE_TOKENS = 64
"""Least tokens of a piece: at 30 layers with 3 heads of 64 dimensions, 1.4 MiB."""
_HOMES = "homes"
_PROCESS = token_hex(16)


@dataclass(frozen=True)
class Found:
    """A prompt of which the beginning is kept.

    tokens: how many. scale: factor on the logits. sinks: keys and values [layers, heads, sinks, .].
    ids, extra: the tokens behind the sinks, and what their pieces depend on beside them.
    """

    tokens: int
    scale: float
    sinks: Piece
    ids: TokenIds
    extra: bytes


def piece_tokens(block_tokens: int) -> int:
    """Tokens of a piece: what prompts share, and load, is a multiple of it."""
    return -(-_PIECE_TOKENS // block_tokens) * block_tokens


class PrefixRecords:
    """Records of one engine's prompts in a store.

    Parameters
    ----------
    model: text that is equal where keys and values of equal tokens are.
    """

    def __init__(self, store: KeyedStore, layout: BlockLayout, rules: Rules, model: str) -> None:
        geometry, preset = rules.geometry, rules.preset
        self._store, self._layout, self._geometry = store, layout, geometry
        self._sinks = preset.sinks
        segments = geometry.layers * geometry.kv_heads
        self.piece_tokens = piece_tokens(preset.block_tokens)
        self._root_tokens = max(1, preset.sinks)
        width = (geometry.head_dim + geometry.value_size) * geometry.dtype.itemsize
        self._roots = PrefixCache(
            store, block_tokens=self._root_tokens, block_bytes=8 + segments * preset.sinks * width
        )
        self._pieces = segment_cache(store, layout, segments, block_tokens=self.piece_tokens)
        self._salt = _digest(_VERSION, model, _sizes(geometry), layout.signature, preset.sinks)
        # An address in the text would be another function's in another process.
        own = _PROCESS if " at 0x" in repr(preset) else ""
        self._index_salt = _digest(metadata.version("tierstore"), repr(preset), own)

    # Tokens, keys and values

    def find(self, tokens: Tokens | Sequence[int]) -> Found | None:
        """What is kept of a prompt's beginning, as far as is known without reading pieces."""
        ids, salt = token_ids(tokens), self._salt
        root: Bytes = np.empty((1, self._roots.block_bytes), np.uint8)
        if not self._roots.get_into(ids[: self._root_tokens], root, extra=salt):
            return None
        salt += ids[: self._sinks].tobytes()
        behind = ids[self._sinks :]
        tokens_kept = self._pieces.match_chain(self._chain(behind, salt)) * self.piece_tokens
        if not tokens_kept:
            return None
        scale = float(root[0, :8].view(np.float64)[0])
        sinks = self._unpacked(root[0, 8:])
        return Found(self._sinks + tokens_kept, scale, sinks, behind, salt)

    def begin(self, found: Found, tokens: int) -> SavedRun:
        """Begin to read pieces that hold so many tokens, the sinks included.

        They may turn out to be fewer, where a piece is gone or damaged.
        """
        pieces = -(-(tokens - self._sinks) // self.piece_tokens)
        ids = found.ids[: pieces * self.piece_tokens]
        segments = self._geometry.layers * self._geometry.kv_heads
        return SavedRun(self._pieces, ids, self._layout, segments, extra=found.extra)

    def save(self, tokens: Tokens | Sequence[int], text: SavedText) -> tuple[int, Chain | None]:
        """Keep the whole pieces of a prompt; returns tokens kept, and their chain."""
        ids, salt = token_ids(tokens), self._salt
        behind = ids[self._sinks :]
        whole = len(behind) // self.piece_tokens * self.piece_tokens
        if not whole:
            return 0, None
        root = np.concatenate([np.array([text.scale]).view(np.uint8), self._packed(text.sinks)])
        self._roots.put(ids[: self._root_tokens], root[None], extra=salt)
        salt += ids[: self._sinks].tobytes()
        saved = save_segments(
            self._pieces, behind[:whole], text.store, text.segments, tail=text.tail, extra=salt
        )
        chain = self._chain(behind[:saved], salt) if saved else None
        return (self._sinks + saved if saved else 0), chain

    def _chain(self, ids: TokenIds, extra: bytes) -> Chain:
        own = group_extra(self._layout, self._geometry.layers * self._geometry.kv_heads, extra)
        return self._pieces.chain(ids, extra=own)

    def _packed(self, sinks: Piece) -> Bytes:
        parts = [part.cpu().contiguous().view(torch.uint8).flatten().numpy() for part in sinks]
        return np.concatenate(parts)

    def _unpacked(self, data: Bytes) -> Piece:
        shape = self._geometry
        heads = (shape.layers, shape.kv_heads, self._sinks)
        at = shape.layers * shape.kv_heads * self._sinks * shape.head_dim * shape.dtype.itemsize
        pieces = []
        for part, width in ((data[:at], shape.head_dim), (data[at:], shape.value_size)):
            elements = torch.empty((*heads, width), dtype=shape.dtype)
            if len(part):
                elements.view(-1).view(torch.uint8).copy_(torch.from_numpy(part))
            pieces.append(elements.to(shape.device))
        return pieces[0], pieces[1]

    # Indexes

    def save_index(self, chain: Chain, states: Sequence[State], homes: Bytes) -> None:
        """Keep the indexes of all layers at the end of a prompt, and where its blocks are."""
        keys = self._index_keys(chain.proof, len(states))
        values = [pack_arrays({_HOMES: homes}), *(pack_arrays(state) for state in states)]
        end_keys = self._end_keys(chain)
        if self._store.contains_many(keys).all() and self._store.contains_many(end_keys).all():
            return
        ends = [trailer.tobytes() + chain.proof for trailer in chain.trailers]
        self._store.put_many([*keys, *end_keys], [memoryview(value) for value in (*values, *ends)])

    def load_index(
        self, found: Found, tokens: int, layers: int
    ) -> tuple[list[State], Bytes] | None:
        """Indexes of some prompt that goes on from these tokens, and homes of its blocks.

        None if there is none, or not of every layer.
        """
        pieces = -(-(tokens - self._sinks) // self.piece_tokens)
        chain = self._chain(found.ids[: pieces * self.piece_tokens], found.extra)
        if not len(chain):
            return None
        end = self._store.get(self._end_keys(chain)[-1])
        trailer = chain.trailers[-1].tobytes()
        if end is None or end[: len(trailer)] != trailer:
            return None
        values = self._store.get_many(self._index_keys(end[len(trailer) :], layers))
        states = [None if value is None else unpack_arrays(value) for value in values]
        whole = [state for state in states if state is not None]
        if len(whole) < len(states) or _HOMES not in whole[0]:
            return None
        return whole[1:], whole[0][_HOMES]

    def _index_keys(self, proof: bytes, layers: int) -> list[bytes]:
        """Keys of homes and of each layer's index, 38 bytes each."""
        facts = self._index_salt.hex(), proof.hex()
        return [b"index:" + _digest(*facts, number) for number in range(layers + 1)]

    def _end_keys(self, chain: Chain) -> list[bytes]:
        """Where each piece says at the end of which prompt the indexes are."""
        salt = b"end:" + self._index_salt[:16]
        return [salt + digest.tobytes() for digest in chain.digests]


@dataclass(frozen=True)
class SavedText:
    """One sequence's tokens as an engine has them.

    scale, sinks: as in `Found`. segments: of all layers and heads, with the blocks behind the
    sinks. tail: uint8 [S, n, block_bytes], whole blocks of the tokens behind those.
    """

    scale: float
    sinks: Piece
    store: BlockStore
    segments: Ids
    tail: Bytes


def _digest(*facts: object) -> bytes:
    return sha256(json.dumps(facts).encode()).digest()


def _sizes(geometry: Geometry) -> Sequence[object]:
    return (
        geometry.layers, geometry.query_heads, geometry.kv_heads, geometry.head_dim,
        geometry.value_size, str(geometry.dtype),
    )  # fmt: skip


def state_rows(state: Mapping[str, npt.NDArray[Any]], rows: slice, total: int) -> State | None:
    """The part of an index's state that is about some of its rows; None where it has no rows."""
    own: State = {}
    for name, array in state.items():
        if array.ndim and len(array) != total:
            return None
        own[name] = array[rows] if array.ndim else array
    return own


def joined(states: Sequence[State | None], rows: int) -> State | None:
    """The state of an index of several sequences, of `rows` rows each; None for an empty one."""
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    whole: State = {}
    for name, array in known.items():
        if not array.ndim:
            whole[name] = array
            continue
        own = [None if state is None else state[name] for state in states]
        widths = np.max([part.shape[1:] for part in own if part is not None], axis=0)
        out = np.zeros((len(own) * rows, *widths.astype(int)), array.dtype)
        for number, part in enumerate(own):
            if part is not None:
                first = slice(number * rows, (number + 1) * rows)
                out[(first, *map(slice, part.shape[1:]))] = part
        whole[name] = out
    return whole
