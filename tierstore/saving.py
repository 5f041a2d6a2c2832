"""Segments of a block store saved in a prefix cache, and brought back for prompts that begin alike.

A *group* is the segments of one sequence: every layer and KV head. A block of the prefix cache is
`block_tokens` tokens of all of them, in the order of the segments; so prefixes share what they have
in common, a record describes thousands of blocks, and what was saved outlives the process.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Self

import numpy as np

from tierstore.aligned import aligned_rows
from tierstore.chain import trailer_bytes
from tierstore.errors import ConfigError
from tierstore.prefix import PrefixCache
from tierstore.volume.format import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.chain import Tokens
    from tierstore.interfaces import Bytes, Ids
    from tierstore.keyed import KeyedStore
    from tierstore.layout import BlockLayout
    from tierstore.store import BlockStore

_BYTES_AT_ONCE = 8 << 20
_READS = 2
"""Reads of so many bytes under way at once."""
_BUFFERS = 6
"""What is read or waits to be entered: the disk goes on while indexes are restored."""


def segment_cache(
    store: KeyedStore, layout: BlockLayout, segments: int, *, block_tokens: int
) -> PrefixCache:
    """A prefix cache for groups of so many segments.

    block_tokens: tokens that are saved and found together, a multiple of `layout.tokens`.
    """
    if segments < 1 or block_tokens < 1 or block_tokens % layout.tokens:
        raise ConfigError(
            f"segments={segments}, block_tokens={block_tokens}: expected at least one segment, and "
            f"a multiple of the layout's {layout.tokens} tokens"
        )
    nbytes = _piece_bytes(layout, segments, block_tokens)
    return PrefixCache(store, block_tokens=block_tokens, block_bytes=nbytes)


def group_extra(layout: BlockLayout, segments: int, extra: bytes = b"") -> bytes:
    """What the pieces of a group depend on beside tokens: others may be padded to as many bytes."""
    return b"%d segments of %d bytes:%b" % (segments, layout.block_bytes, extra)


def _piece_bytes(layout: BlockLayout, segments: int, block_tokens: int) -> int:
    """Bytes of a piece: its blocks, and as many more as make its value whole pages and blocks.

    So values come straight from the disk, and what stands in them is an array of blocks.
    """
    proof = trailer_bytes(block_tokens)
    blocks = segments * (block_tokens // layout.tokens) * layout.block_bytes
    unit = math.lcm(PAGE, layout.block_bytes)
    return -(-(blocks + proof) // unit) * unit - proof


def save_segments(
    cache: PrefixCache,
    tokens: Tokens | Sequence[int],
    store: BlockStore,
    segments: Ids,
    *,
    tail: Bytes | None = None,
    extra: bytes = b"",
) -> int:
    """Save a group's blocks of a prompt, as far as they are whole; returns tokens now saved.

    tokens: the prompt that the segments hold from their first block on, in order. tail: uint8
    [S, n, block_bytes], blocks that follow those in the store. What is saved already is not written
    again; the store may refuse some, which shortens what is found later.
    """
    each = _check_fit(cache, store.layout, len(segments))
    stored = int(store.space.blocks[segments].min())
    have = stored + (0 if tail is None else tail.shape[1])
    total = min(len(tokens) // cache.block_tokens, have // each)
    own = tokens[: total * cache.block_tokens]
    chain = cache.chain(own, extra=group_extra(store.layout, len(segments), extra))
    first = cache.match_chain(chain)
    values = aligned_rows(_step(cache, total - first), cache.value_bytes)
    for start in range(first, total, len(values)):
        count = min(len(values), total - start)
        blocks = values[:count].reshape(-1, store.layout.block_bytes)
        rows = _rows(cache, store.layout, len(segments), count)
        inside = max(0, min(stored - start * each, count * each))
        if inside:
            targets: Ids = np.ascontiguousarray(rows[:, :inside])
            store.read(segments, start * each, inside, blocks, targets)
        if tail is not None and inside < count * each:
            behind = start * each + inside - stored
            blocks[rows[:, inside:]] = tail[:, behind : behind + count * each - inside]
        cache.put_values(chain, values[:count], start)
    return cache.match_chain(chain) * cache.block_tokens


def load_segments(
    cache: PrefixCache,
    tokens: Tokens | Sequence[int],
    store: BlockStore,
    segments: Ids,
    *,
    homes: Bytes | None = None,
    extra: bytes = b"",
) -> int:
    """Append the longest saved run of a prompt to a group of empty segments; returns its tokens.

    homes: uint8 [S, n], as for `BlockStore.append`, of the first n blocks; blocks behind them get
    no copy beside the backing one. CapacityError if the block store is full; the segments are then
    as far as they came.
    """
    _check_fit(cache, store.layout, len(segments))
    with SavedRun(cache, tokens, store.layout, len(segments), extra=extra) as run:
        return run.append_to(store, segments, homes=homes)


class SavedRun:
    """The longest saved run of a prompt on its way from the disk, from the moment this is made.

    What is not yet entered waits in memory, some 48 MiB at most. Leave the context to let go of it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tokens: Tokens | Sequence[int],
        layout: BlockLayout,
        segments: int,
        *,
        extra: bytes = b"",
    ) -> None:
        self._cache, self._each = cache, _check_fit(cache, layout, segments)
        self._chain = cache.chain(tokens, extra=group_extra(layout, segments, extra))
        self._step = _step(cache, len(self._chain))
        self._starts = iter(range(0, len(self._chain), self._step))
        self._readers = ThreadPoolExecutor(_READS, "tierstore-load")
        self._under_way: deque[Future[tuple[Bytes, int, int]]] = deque()
        for _ in range(_BUFFERS):
            self._begin(None)

    def _begin(self, buffer: Bytes | None) -> None:
        """Read what comes next, if anything does."""
        for start in islice(self._starts, 1):
            if buffer is None:
                buffer = aligned_rows(self._step, self._cache.value_bytes)
            self._under_way.append(self._readers.submit(self._read, buffer, start))

    def _read(self, buffer: Bytes, start: int) -> tuple[Bytes, int, int]:
        wanted = min(self._step, len(self._chain) - start)
        return buffer, wanted, self._cache.get_values(self._chain, buffer[:wanted], start)

    def append_to(self, store: BlockStore, segments: Ids, *, homes: Bytes | None = None) -> int:
        """`load_segments` of what is read here; once."""
        if store.space.blocks[segments].any():
            raise ConfigError(
                f"segments {segments.tolist()} have {store.space.blocks[segments].tolist()} "
                "blocks: expected empty ones"
            )
        start = 0
        while self._under_way:
            buffer, wanted, count = self._under_way.popleft().result()
            rows = _rows(self._cache, store.layout, len(segments), count)
            blocks = buffer[:count].reshape(-1, store.layout.block_bytes)
            own = None if homes is None else _part(homes, start, rows.shape[1], store.backing)
            store.append(segments, blocks, home=own, rows=rows)
            start += count * self._each
            if count < wanted:
                break
            self._begin(buffer)
        return start * store.layout.tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)


def _part(homes: Bytes, first: int, count: int, backing: int) -> Bytes:
    """The homes of `count` blocks from number `first` on."""
    own: Bytes = np.full((len(homes), count), backing, np.uint8)
    known = homes[:, first : first + count]
    own[:, : known.shape[1]] = known
    return own


def _rows(cache: PrefixCache, layout: BlockLayout, segments: int, count: int) -> Ids:
    """Where each segment's blocks stand in `count` values: int32 [S, count * blocks each]."""
    each = cache.block_tokens // layout.tokens
    value = np.arange(count)[:, None] * (cache.value_bytes // layout.block_bytes)
    inside = np.arange(segments)[:, None, None] * each + np.arange(each)
    rows: Ids = (value + inside).reshape(segments, -1).astype(np.int32)
    return rows


def _step(cache: PrefixCache, values: int) -> int:
    """Values that are copied at once, of so many."""
    return max(1, min(values, _BYTES_AT_ONCE // cache.value_bytes))


def _check_fit(cache: PrefixCache, layout: BlockLayout, segments: int) -> int:
    """Blocks of a segment in a piece of the cache; ConfigError if they do not go together."""
    expected = _piece_bytes(layout, segments, cache.block_tokens)
    if cache.block_bytes != expected or cache.block_tokens % layout.tokens:
        raise ConfigError(
            f"a cache of blocks of {cache.block_tokens} tokens and {cache.block_bytes} bytes: "
            f"expected {expected} bytes for {segments} segments; make it with segment_cache"
        )
    return cache.block_tokens // layout.tokens
