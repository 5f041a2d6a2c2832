"""Segments of a block store saved in a prefix cache, and brought back for prompts that begin alike.

A *group* is the segments of one sequence: every layer and KV head. A block of the prefix cache is
`block_tokens` tokens of all of them, in the order of the segments; so prefixes share what they have
in common, a record describes thousands of blocks, and what was saved outlives the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError
from tierstore.prefix import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.chain import Tokens
    from tierstore.interfaces import Bytes, Ids
    from tierstore.keyed import KeyedStore
    from tierstore.layout import BlockLayout
    from tierstore.store import BlockStore

_BYTES_AT_ONCE = 32 << 20


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
    each = block_tokens // layout.tokens
    return PrefixCache(
        store, block_tokens=block_tokens, block_bytes=segments * each * layout.block_bytes
    )


def save_segments(
    cache: PrefixCache,
    tokens: Tokens | Sequence[int],
    store: BlockStore,
    segments: Ids,
    *,
    extra: bytes = b"",
) -> int:
    """Save a group's blocks of a prompt, as far as they are whole; returns tokens now saved.

    tokens: the prompt that the segments hold from their first block on, in order. What is saved
    already is not written again; the store may refuse some, which shortens what is found later.
    """
    each = _blocks_each(cache, store, segments)
    total = min(len(tokens) // cache.block_tokens, int(store.space.blocks[segments].min()) // each)
    chain = cache.chain(tokens[: total * cache.block_tokens], extra=extra)
    first, step = cache.match_chain(chain), _step(cache)
    for start in range(first, total, step):
        count = min(step, total - start)
        read: Bytes = np.empty((len(segments), count * each, store.layout.block_bytes), np.uint8)
        store.read(segments, start * each, count * each, read)
        blocks = read.reshape(len(segments), count, -1).swapaxes(0, 1).reshape(count, -1)
        cache.put_chain(chain, blocks, start)
    return cache.match_chain(chain) * cache.block_tokens


def load_segments(
    cache: PrefixCache,
    tokens: Tokens | Sequence[int],
    store: BlockStore,
    segments: Ids,
    *,
    extra: bytes = b"",
) -> int:
    """Append the longest saved run of a prompt to a group of empty segments; returns its tokens.

    CapacityError if the block store is full; the segments are then as far as they came.
    """
    each = _blocks_each(cache, store, segments)
    if store.space.blocks[segments].any():
        raise ConfigError(
            f"segments {segments.tolist()} have {store.space.blocks[segments].tolist()} blocks: "
            "expected empty ones"
        )
    chain, step = cache.chain(tokens, extra=extra), _step(cache)
    out: Bytes = np.empty((step, cache.block_bytes), np.uint8)
    count, start = step, 0
    while count == step:
        count = cache.get_chain_into(chain, out, start)
        shape = (count, len(segments), each * store.layout.block_bytes)
        blocks = np.ascontiguousarray(out[:count].reshape(shape).swapaxes(0, 1))
        store.append(segments, blocks.reshape(len(segments), -1, store.layout.block_bytes))
        start += count
    return int(store.space.blocks[segments[0]]) * store.layout.tokens


def _step(cache: PrefixCache) -> int:
    """Blocks of the cache that are copied at once."""
    return max(1, _BYTES_AT_ONCE // cache.block_bytes)


def _blocks_each(cache: PrefixCache, store: BlockStore, segments: Ids) -> int:
    """Blocks of a segment in a block of the cache; ConfigError if they do not go together."""
    each = cache.block_tokens // store.layout.tokens
    expected = len(segments) * each * store.layout.block_bytes
    if cache.block_bytes != expected or cache.block_tokens % store.layout.tokens:
        raise ConfigError(
            f"a cache of blocks of {cache.block_tokens} tokens and {cache.block_bytes} bytes: "
            f"expected {expected} bytes for {len(segments)} segments; make it with segment_cache"
        )
    return each
