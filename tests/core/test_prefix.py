"""Prompts' blocks by their tokens: keys, runs, collisions, leases, and names that share blocks."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxh3 import xxh3_128

from tierstore.errors import ConfigError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.prefix import NamedPrefix, PrefixCache, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tierstore.arguments import Keys
    from tierstore.interfaces import Bytes, Pointers
    from tierstore.lease import Lease

BLOCK = 64
"""Bytes of a block; blocks have 4 tokens, unless a test says otherwise."""

A = list(range(100, 120))
B = [*A[:8], *range(200, 212)]
"""Prompts of 5 blocks that agree in the first two."""


def keys_of(
    tokens: Sequence[int], block_tokens: int, parent: bytes = b"", extra: bytes = b""
) -> list[bytes]:
    """The keys of whole blocks, from the description of `hash_blocks` and of XXH3."""
    keys = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        sizes = struct.pack("<3I", len(parent), block_tokens, len(extra))
        ids = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        parent = xxh3_128(b"tierstore.prefix" + sizes + parent + ids + extra)
        keys.append(parent)
    return keys


def rows(keys: Bytes) -> list[bytes]:
    return [key.tobytes() for key in keys]


def random_blocks(count: int, seed: int = 0, block: int = BLOCK) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, block), np.uint8)


def make_cache(store: KeyedStore, block_tokens: int = 4, block_bytes: int = BLOCK) -> PrefixCache:
    return PrefixCache(store, block_tokens=block_tokens, block_bytes=block_bytes)


def contents(store: KeyedStore) -> dict[bytes, bytes | None]:
    return {key: store.get(key) for key in store}


def stored_blocks(store: KeyedStore) -> set[bytes]:
    return {key.removeprefix(b"block:4x64:") for key in store.keys(b"block:")}


def read(cache: PrefixCache, tokens: Sequence[int], extra: bytes = b"") -> list[bytes]:
    """The blocks of a prompt that the cache has."""
    out = np.zeros((len(tokens) // cache.block_tokens, BLOCK), np.uint8)
    return rows(out[: cache.get_into(tokens, out, extra=extra)])


def open_store(path: Path) -> KeyedStore:
    """A store with room for a few hundred blocks."""
    return KeyedStore(path / "store", Identity(), disk="3MiB", segment="64KiB")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyedStore]:
    with open_store(tmp_path) as store:
        yield store
        store.validate()


@pytest.fixture
def cache(store: KeyedStore) -> PrefixCache:
    return make_cache(store)


# Keys


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "extra", "expected"),
    [
        (range(1, 9), 4, b"",
         ["83874e256c501ca3f376f8eff1f6fe57", "8b220ac1a10403f1cf8a1886aaa45a7b"]),
        ([0, 1, 2**31, 2**32 - 1, 0, 0, 0, 0], 4, b"lora",
         ["5e24406816531cadca71050cda5a50e7", "9c1ab6c7efc3f8c7aee3dee410374778"]),
        ([7], 1, b"", ["2882860132cb5b8692349e16397177ee"]),
    ],
)  # fmt: skip
def test_keys_are_pinned(
    tokens: Sequence[int], block_tokens: int, extra: bytes, expected: list[str]
) -> None:
    """Keys are on disks: whatever changes them makes every stored prefix a miss."""
    keys = hash_blocks(list(tokens), block_tokens, extra=extra)
    assert [key.hex() for key in rows(keys)] == expected


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 8),
    st.sampled_from([b"", bytes(16), b"0123456789abcdef"]),
    st.binary(max_size=40),
)
def test_keys_are_what_the_description_says(
    tokens: list[int], block_tokens: int, parent: bytes, extra: bytes
) -> None:
    keys = hash_blocks(tokens, block_tokens, parent, extra)
    assert keys.dtype == np.uint8
    assert keys.shape == (len(tokens) // block_tokens, 16)
    assert rows(keys) == keys_of(tokens, block_tokens, parent, extra)


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24))
def test_keys_agree_exactly_as_long_as_the_tokens_do(first: list[int], second: list[int]) -> None:
    pairs = zip(rows(hash_blocks(first, 3)), rows(hash_blocks(second, 3)), strict=False)
    for i, (one, other) in enumerate(pairs):
        assert (one == other) == (first[: 3 * i + 3] == second[: 3 * i + 3])


def test_a_chain_goes_on_from_its_last_key() -> None:
    whole = hash_blocks(A, 4, extra=b"salt")
    start = hash_blocks(A[:12], 4, extra=b"salt")
    rest = hash_blocks(A[12:], 4, parent=start[-1], extra=b"salt")
    assert rows(whole) == rows(start) + rows(rest)


def test_no_two_arguments_can_stand_for_each_other() -> None:
    """All of these have the same bytes if parent, tokens and extra are written without sizes."""
    words = struct.unpack("<8I", bytes(range(32)))
    data = bytes(range(32))
    keys = {
        hash_blocks(words, 8)[0].tobytes(),
        hash_blocks(words[:4], 4, extra=data[16:])[0].tobytes(),
        hash_blocks(words[4:], 4, parent=data[:16])[0].tobytes(),
        hash_blocks(words[4:6], 2, parent=data[:16], extra=data[24:])[0].tobytes(),
        hash_blocks(words[:2], 2, extra=data[8:])[0].tobytes(),
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda tokens: np.array(tokens, np.int8),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint64),
        lambda tokens: np.array(tokens, ">i4"),
        lambda tokens: np.repeat(np.array(tokens), 3)[::3],
        lambda tokens: np.array(tokens)[::-1].copy()[::-1],
        torch.tensor,
    ],
)
def test_the_type_of_tokens_does_not_matter(convert: Callable[[list[int]], Any]) -> None:
    tokens = A[:17]
    assert rows(hash_blocks(convert(tokens), 4)) == keys_of(tokens, 4)


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], np.empty(0, np.int64)])
def test_less_than_a_block_has_no_key(tokens: Sequence[int]) -> None:
    assert hash_blocks(tokens, 4).shape == (0, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -1, 3], 2), r"tokens\[1\]=-1: expected ids from 0 to 4294967295"),
        (([1, 2, 2**32], 2), r"tokens\[2\]=4294967296: expected ids from 0 to 4294967295"),
        ((np.array([2**63], np.uint64), 1), r"tokens\[0\]=9223372036854775808: expected ids"),
        (([2**64], 1), "tokens of type object: expected whole numbers"),
        (([1.0, 2.0], 2), "tokens of type float64: expected whole numbers"),
        (([True, False], 2), "tokens of type bool: expected whole numbers"),
        ((["a"], 1), "tokens of type <U1: expected whole numbers"),
        (([[1, 2]], 2), r"tokens of shape \(1, 2\): expected one prompt"),
        (([[1, 2], [3]], 2), "tokens: expected one prompt"),
        ((5, 2), r"tokens of shape \(\): expected one prompt"),
        (([1], 0), "block_tokens=0: expected a whole number from 1"),
        (([1], 1.5), r"block_tokens=1\.5: expected a whole number"),
        (([1], True), "block_tokens=True: expected a whole number"),
        (([1], 1, b"short"), "parent of 5 bytes: expected the 16 bytes of a key"),
        (([1], 1, "text"), "parent='text': expected bytes"),
        (([1], 1, b"", "text"), "extra='text': expected bytes"),
        (([1], 1, b"", 3), "extra=3: expected bytes"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        hash_blocks(*arguments)


# Runs


def test_blocks_come_back_by_their_tokens(cache: PrefixCache) -> None:
    blocks = random_blocks(5)
    assert cache.put([*A, 1, 2], blocks) == 5
    assert cache.match(A) == 5
    assert read(cache, A) == rows(blocks)


def test_a_prompt_finds_the_blocks_of_another_as_long_as_they_agree(cache: PrefixCache) -> None:
    blocks = random_blocks(5)
    cache.put(A, blocks)
    assert cache.match(B) == 2
    assert read(cache, B) == rows(blocks[:2])
    assert read(cache, [*A[:7], 0]) == rows(blocks[:1])
    assert read(cache, [0, *A]) == []


def test_shared_blocks_are_written_once(cache: PrefixCache) -> None:
    """The second prompt's own idea of the first two blocks is not looked at."""
    first, second = random_blocks(5, 1), random_blocks(5, 2)
    assert cache.put(A, first) == 5
    assert cache.put(B, second) == 3
    assert cache.put(B, second) == 0
    assert read(cache, A) == rows(first)
    assert read(cache, B) == rows(first[:2]) + rows(second[2:])


def test_the_rest_of_a_prompt_is_put_without_its_start(cache: PrefixCache) -> None:
    blocks = random_blocks(5)
    assert cache.put(A, blocks[2:], first=2) == 3
    assert cache.match(A) == 0
    assert cache.put(A[:8], blocks[:2]) == 2
    assert read(cache, A) == rows(blocks)
    assert cache.put(A, blocks[5:], first=5) == 0


def test_blocks_with_another_extra_are_others(cache: PrefixCache) -> None:
    plain, lora = random_blocks(5, 1), random_blocks(5, 2)
    cache.put(A, plain)
    assert cache.match(A, extra=b"lora") == 0
    assert cache.put(A, lora, extra=b"lora") == 5
    assert read(cache, A) == rows(plain)
    assert read(cache, A, extra=b"lora") == rows(lora)


def test_caches_with_other_block_sizes_share_a_store_and_no_blocks(store: KeyedStore) -> None:
    fours, fives = make_cache(store, 4), make_cache(store, 5)
    fours.put(A, random_blocks(5, 1))
    assert fives.match(A) == 0
    fives.put(A, random_blocks(4, 2))
    assert read(fours, A) == rows(random_blocks(5, 1))
    assert read(fives, A) == rows(random_blocks(4, 2))


def test_a_run_ends_at_a_missing_block(cache: PrefixCache, store: KeyedStore) -> None:
    blocks = random_blocks(5)
    cache.put(A, blocks)
    store.delete(b"block:4x64:" + keys_of(A, 4)[2])
    assert cache.match(A) == 2
    out = np.full((5, BLOCK), 0xEE, np.uint8)
    assert cache.get_into(A, out) == 2
    assert rows(out[:2]) == rows(blocks[:2])
    assert (out[2:] == 0xEE).all()
    assert cache.put(A, blocks) == 1
    assert read(cache, A) == rows(blocks)


def test_only_as_many_blocks_are_read_as_there_is_room_for(cache: PrefixCache) -> None:
    cache.put(A, random_blocks(5))
    out = np.zeros((3, BLOCK), np.uint8)
    assert cache.get_into(A, out) == 3
    assert rows(out) == rows(random_blocks(5)[:3])
    assert cache.get_into(A, out[:0]) == 0
    wide = np.zeros((7, 2 * BLOCK), np.uint8)
    assert cache.get_into(A, wide[:, ::2]) == 5
    assert rows(wide[:5, ::2]) == rows(random_blocks(5))
    assert not wide[:, 1::2].any()
    assert not wide[5:].any()


@pytest.mark.usefixtures("colliding")
def test_blocks_of_other_sizes_do_not_meet(store: KeyedStore) -> None:
    """Not even if all keys collide; some of their values are equally long."""
    sizes = [(4, 64), (4, 80), (4, 112), (8, 64), (5, 60)]
    caches = [make_cache(store, tokens, size) for tokens, size in sizes]
    for cache in caches:
        blocks = random_blocks(1, cache.block_bytes, cache.block_bytes)
        assert cache.put(A[: cache.block_tokens], blocks) == 1
    for cache in caches:
        out = np.zeros((1, cache.block_bytes), np.uint8)
        assert cache.get_into(A[: cache.block_tokens], out) == 1
        assert rows(out) == rows(random_blocks(1, cache.block_bytes, cache.block_bytes))


@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_block_evicted_between_match_and_read_shortens_the_run(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    cache.put(A, random_blocks(5))
    get_into = store.get_into

    def evict_first(keys: Keys, out: Bytes, *, deadline: float | None = None) -> Pointers:
        store.delete(b"block:4x64:" + keys_of(A, 4)[position])
        return get_into(keys, out, deadline=deadline)

    monkeypatch.setattr(store, "get_into", evict_first)
    out = np.full((5, BLOCK), 0xEE, np.uint8)
    assert cache.get_into(A, out) == position
    assert rows(out[:position]) == rows(random_blocks(5)[:position])
    assert (out[position:] == 0xEE).all()


def test_long_runs_are_moved_in_batches(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 blocks here; the second one ends before a gap, and no third is asked for."""
    monkeypatch.setattr("tierstore.prefix._SCRATCH_BYTES", 100)
    tokens, blocks = list(range(100)), random_blocks(25)
    assert cache.put(tokens, blocks) == 25
    assert read(cache, tokens) == rows(blocks)
    asked: list[int] = []
    get_into, gap = store.get_into, b"block:4x64:" + keys_of(tokens, 4)[11]

    def watch(keys: Keys, out: Bytes, *, deadline: float | None = None) -> Pointers:
        asked.append(len(keys))
        store.delete(gap)
        return get_into(keys, out, deadline=deadline)

    monkeypatch.setattr(store, "get_into", watch)
    assert read(cache, tokens) == rows(blocks[:11])
    assert asked == [8, 3]


def test_values_go_in_and_out_with_their_proofs(cache: PrefixCache) -> None:
    """As `put` and `get_into` see them, without the copies; a proof of other tokens is a miss."""
    blocks, chain = random_blocks(5), cache.chain(A)
    values = np.zeros((5, cache.value_bytes), np.uint8)
    values[:, : cache.block_bytes] = blocks
    assert cache.put_values(chain, values[:2], 0) == 2
    assert cache.put_values(chain, values[2:], 2) == 3
    assert read(cache, A) == rows(blocks)
    found = np.zeros((4, cache.value_bytes), np.uint8)
    assert cache.get_values(chain, found, 1) == 4
    assert np.array_equal(found, values[1:])
    other = cache.chain([9, *A[1:]])
    other.digests = chain.digests
    assert cache.get_values(other, found) == 0
    with pytest.raises(ConfigError, match=f"values: expected uint8 .*, {cache.value_bytes}"):
        cache.get_values(chain, found[:, 1:])
    with pytest.raises(ConfigError, match="expected at most 5 in all"):
        cache.put_values(chain, values, 1)


def test_a_deadline_covers_the_whole_read(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch takes 2 of the 3 seconds: the second gets 1, and a third would get none."""
    monkeypatch.setattr("tierstore.prefix._SCRATCH_BYTES", 100)
    tokens, now = list(range(100)), [50.0]
    left: list[float | None] = []
    cache.put(tokens, random_blocks(25))
    get_into = store.get_into

    def slow(keys: Keys, out: Bytes, *, deadline: float | None = None) -> Pointers:
        left.append(deadline)
        now[0] += 2
        return get_into(keys, out)

    monkeypatch.setattr(store, "get_into", slow)
    monkeypatch.setattr("tierstore.deadlines.monotonic", lambda: now[0])
    cache.get_into(tokens, np.zeros((25, BLOCK), np.uint8), deadline=3.0)
    assert left == [3.0, 1.0, 0.0, 0.0]
    cache.get_into(tokens[:32], np.zeros((8, BLOCK), np.uint8))
    assert left[4:] == [None]


def test_what_the_store_refuses_is_not_counted(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_many, refused = store.put_many, b"block:4x64:" + keys_of(A, 4)[3]

    def refuse(keys: Keys, values: Bytes) -> np.ndarray:
        put_many(keys, values)
        store.delete(refused)
        return np.array([bytes(key) != refused for key in keys])

    monkeypatch.setattr(store, "put_many", refuse)
    assert cache.put(A, random_blocks(5)) == 4
    assert cache.match(A) == 3


def test_a_chain_is_used_from_its_end(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the least recently used of its blocks is the last one, which nothing hangs on."""
    keys = [b"block:4x64:" + key for key in keys_of(A, 4)]
    used: list[bytes] = []
    monkeypatch.setattr(store, "touch_many", lambda keys: used.extend(map(bytes, keys)))
    cache.put(A, random_blocks(5))
    assert used == keys[::-1]
    used.clear()
    read(cache, A[:12])
    assert used == keys[2::-1]


def test_a_full_store_loses_a_chain_from_its_end(cache: PrefixCache, store: KeyedStore) -> None:
    """Blocks that are left are of use only if all before them are left too."""
    tokens = list(range(200))
    cache.put(tokens, random_blocks(50))
    others = 0
    while len(stored_blocks(store)) > 30:
        store.put(b"other %d" % others, bytes(BLOCK))
        others += 1
    assert cache.match(tokens) == len(stored_blocks(store)) > 0


def test_the_caller_may_reuse_its_arrays(cache: PrefixCache) -> None:
    blocks, tokens = random_blocks(5), np.array(A)
    cache.put(tokens, blocks)
    blocks[:] = 0
    tokens[:] = 0
    assert read(cache, A) == rows(random_blocks(5))


@pytest.mark.parametrize(
    ("blocks", "first", "message"),
    [
        (random_blocks(4), 0, "blocks of 4 rows, first=0: expected 5 whole blocks in all"),
        (random_blocks(5), 1, "blocks of 5 rows, first=1: expected 5 whole blocks in all"),
        (random_blocks(6), -1, "blocks of 6 rows, first=-1: expected 5 whole blocks in all"),
        (np.zeros((5, 64)), 0, r"blocks: expected uint8 \[blocks, 64\], found float64 \[5, 64\]"),
        (np.zeros(5, np.uint8), 0, r"blocks: expected uint8 .*, found uint8 \[5\]"),
        ([b"x"] * 5, 0, r"blocks: expected uint8 .*, found list"),
        (random_blocks(5, block=63), 0, r"blocks: expected uint8 .*, found uint8 \[5, 63\]"),
    ],
)
def test_what_is_put_must_be_the_prompts_blocks(
    cache: PrefixCache, store: KeyedStore, blocks: Bytes, first: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        cache.put(A, blocks, first=first)
    assert len(store) == 0


@pytest.mark.parametrize(
    "out", [np.zeros((5, 64)), random_blocks(5, block=65), np.zeros(64, np.uint8), bytearray(64)]
)
def test_room_for_blocks_must_be_bytes(cache: PrefixCache, out: Bytes) -> None:
    with pytest.raises(ConfigError, match=r"^out: expected uint8 \[blocks, 64\], found"):
        cache.get_into(A, out)


def test_a_cache_needs_a_block_size(store: KeyedStore) -> None:
    with pytest.raises(ConfigError, match=r"^block_tokens=0: expected"):
        make_cache(store, 0)
    with pytest.raises(ConfigError, match=r"^block_bytes=-1: expected"):
        make_cache(store, 4, -1)


# Collisions


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of every prompt has the same key."""
    monkeypatch.setattr("tierstore.chain.xxh3_128_digest", lambda data: bytes(16))


@pytest.mark.usefixtures("colliding")
def test_a_block_of_other_tokens_under_the_same_key_is_a_miss(cache: PrefixCache) -> None:
    cache.put(A[:4], random_blocks(1))
    assert cache.match(B[8:12]) == 1
    out = np.full((1, BLOCK), 0xEE, np.uint8)
    assert cache.get_into(B[8:12], out) == 0
    assert (out == 0xEE).all()
    with cache.lease(B[8:12], owner="test", seconds=60) as lease:
        assert len(lease) == 0
    assert read(cache, A[:4]) == rows(random_blocks(1))


@pytest.mark.usefixtures("colliding")
def test_the_same_tokens_after_others_are_a_miss(cache: PrefixCache) -> None:
    """The tokens of the block itself agree; what came before does not."""
    cache.put([1, 2, 3, 4, *A[:4]], random_blocks(1), first=1)
    assert cache.match(A[:4]) == 1
    assert read(cache, A[:4]) == []


@pytest.mark.usefixtures("colliding")
@pytest.mark.parametrize("extra", [b"", b"b"])
def test_the_same_tokens_with_another_extra_are_a_miss(cache: PrefixCache, extra: bytes) -> None:
    cache.put(A[:4], random_blocks(1), extra=b"a")
    assert cache.match(A[:4], extra=extra) == 1
    assert read(cache, A[:4], extra=extra) == []
    assert read(cache, A[:4], extra=b"a") == rows(random_blocks(1))


@pytest.mark.usefixtures("colliding")
def test_a_collision_in_the_middle_ends_the_run(cache: PrefixCache) -> None:
    """Every key but the first leads to the second block."""
    cache.put(A[:4], random_blocks(1))
    assert cache.match(A) == 5
    assert read(cache, A) == rows(random_blocks(1))


def test_a_value_is_block_tokens_and_proof(cache: PrefixCache, store: KeyedStore) -> None:
    """The proof of block i: a SHA-256 chain over sizes and extra, then the blocks before i."""
    blocks = random_blocks(2)
    cache.put(A[:8], blocks, extra=b"salt")
    proof = sha256(b"tierstore.prefix" + struct.pack("<3I", 0, 4, 4) + b"salt").digest()
    for key, block, at in zip(keys_of(A[:8], 4, extra=b"salt"), rows(blocks), (0, 4), strict=True):
        ids = struct.pack("<4I", *A[at : at + 4])
        assert store.get(b"block:4x64:" + key) == block + ids + proof
        proof = sha256(proof + ids).digest()


@pytest.mark.parametrize("at", [BLOCK, BLOCK + 15, BLOCK + 16, BLOCK + 47])
def test_a_value_with_another_trailer_is_a_miss(
    cache: PrefixCache, store: KeyedStore, at: int
) -> None:
    """The first and last byte of the tokens and of the proof."""
    cache.put(A, random_blocks(5))
    key = b"block:4x64:" + keys_of(A, 4)[1]
    value = bytearray(store.get(key) or b"")
    value[at] ^= 1
    store.put(key, bytes(value))
    assert read(cache, A) == rows(random_blocks(5)[:1])


# Leases


def test_a_lease_holds_the_run(cache: PrefixCache) -> None:
    blocks = random_blocks(5)
    cache.put(A, blocks)
    with cache.lease([*A[:12], *B[12:]], owner="test", seconds=60) as lease:
        was_live = lease.is_live
        assert len(lease) == 3
        assert [bytes(view) for view in lease.blocks] == rows(blocks[:3])
        assert all(view.readonly for view in lease.blocks)
    assert (was_live, lease.is_live) == (True, False)
    assert lease.blocks == []


def test_a_lease_can_be_released_early(cache: PrefixCache) -> None:
    cache.put(A, random_blocks(5))
    lease = cache.lease(A, owner="test", seconds=60)
    lease.release()
    assert not lease.is_live
    assert lease.blocks == []


def test_nothing_in_the_store_makes_an_empty_lease(cache: PrefixCache) -> None:
    with cache.lease(A, owner="test", seconds=60) as lease:
        assert len(lease) == 0
    with cache.lease(A[:3], owner="test", seconds=60) as lease:
        assert lease.blocks == []


def test_blocks_after_a_gap_are_not_held(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block leaves between the look and the lease: what the lease got after it is released."""
    cache.put(A, random_blocks(5))
    lease_many = store.lease_many
    made: list[tuple[int, str, float, Lease]] = []

    def evict_first(keys: Keys, *, owner: str, seconds: float) -> Lease:
        store.delete(b"block:4x64:" + keys_of(A, 4)[2])
        lease = lease_many(keys, owner=owner, seconds=seconds)
        made.append((len(keys), owner, seconds, lease))
        return lease

    monkeypatch.setattr(store, "lease_many", evict_first)
    with cache.lease(A, owner="me", seconds=7) as lease:
        assert [bytes(view) for view in lease.blocks] == rows(random_blocks(5)[:2])
        assert [facts for *facts, _ in made] == [[5, "me", 7], [2, "me", 7]]
        assert [inner.is_live for *_, inner in made] == [False, True]


# Names


def test_forgetting_a_name_deletes_the_blocks_that_only_it_held(
    cache: PrefixCache, store: KeyedStore
) -> None:
    cache.put(A, random_blocks(5, 1))
    cache.put(B, random_blocks(5, 2))
    assert cache.retain(b"a", A)
    assert cache.retain(b"b", B)
    assert cache.forget(b"a")
    assert stored_blocks(store) == set(keys_of(B, 4))
    assert cache.forget(b"b")
    assert stored_blocks(store) == set()
    assert not cache.forget(b"b")


def test_blocks_without_a_name_stay(cache: PrefixCache, store: KeyedStore) -> None:
    """No name held the last two blocks of A, so no name takes them along."""
    cache.put(A, random_blocks(5))
    cache.retain(b"a", A[:12])
    cache.forget(b"a")
    assert stored_blocks(store) == set(keys_of(A, 4)[3:])


def test_names_with_another_extra_hold_other_blocks(cache: PrefixCache, store: KeyedStore) -> None:
    cache.put(A, random_blocks(5, 1))
    cache.put(A, random_blocks(5, 2), extra=b"lora")
    cache.retain(b"plain", A)
    cache.retain(b"lora", A, extra=b"lora")
    cache.forget(b"plain")
    assert stored_blocks(store) == set(keys_of(A, 4, extra=b"lora"))


def test_a_name_can_stand_for_more_tokens_as_a_prompt_grows(
    cache: PrefixCache, store: KeyedStore
) -> None:
    cache.put(A, random_blocks(5))
    cache.retain(b"chat", A[:12])
    cache.retain(b"chat", A)
    assert stored_blocks(store) == set(keys_of(A, 4))
    assert cache.names() == [b"chat"]
    cache.forget(b"chat")
    assert stored_blocks(store) == set()


def test_a_name_that_stands_for_other_tokens_gives_up_the_old_ones(
    cache: PrefixCache, store: KeyedStore
) -> None:
    cache.put(A, random_blocks(5, 1))
    cache.put(B, random_blocks(5, 2))
    cache.retain(b"chat", A)
    cache.retain(b"chat", B)
    assert stored_blocks(store) == set(keys_of(B, 4))


def test_a_name_says_what_it_stands_for(cache: PrefixCache) -> None:
    cache.retain(b"a\x00\xff", [*A, 2**32 - 1], extra=b"lora")
    found = cache.find(b"a\x00\xff")
    assert found is not None
    assert found.tokens.tolist() == [*A, 2**32 - 1]
    assert found.extra == b"lora"
    assert (found.block_tokens, found.block_bytes) == (4, BLOCK)
    assert rows(found.digests) == keys_of(A, 4, extra=b"lora")
    assert cache.find(b"b") is None


def test_a_name_may_stand_for_no_tokens(cache: PrefixCache) -> None:
    assert cache.retain(b"empty", [])
    found = cache.find(b"empty")
    assert found is not None
    assert found.tokens.tolist() == []
    assert cache.forget(b"empty")


def read_tail(cache: PrefixCache, name: bytes, size: int = 10) -> tuple[int, bytes]:
    out = np.zeros(size, np.uint8)
    return cache.get_tail_into(name, out), out.tobytes()


def test_tails_belong_to_their_names(cache: PrefixCache) -> None:
    """Two continuations of one prompt; then one of them is written again."""
    tails = random_blocks(3, block=10)
    cache.put(A, random_blocks(5))
    cache.retain(b"a", [*A, 1, 2], tails[0])
    cache.retain(b"b", [*A, 1, 3], tails[1])
    assert read_tail(cache, b"a") == (2, tails[0].tobytes())
    assert read_tail(cache, b"b") == (2, tails[1].tobytes())
    cache.retain(b"a", [*A, 1, 2, 4], tails[2])
    assert read_tail(cache, b"a") == (3, tails[2].tobytes())
    assert read_tail(cache, b"b") == (2, tails[1].tobytes())
    cache.forget(b"a")
    assert read_tail(cache, b"a") == (0, bytes(10))
    assert read_tail(cache, b"b") == (2, tails[1].tobytes())


def test_a_name_retained_without_a_tail_has_none(cache: PrefixCache) -> None:
    tail = random_blocks(1, block=10)[0]
    cache.retain(b"a", [*A, 1], tail)
    cache.retain(b"a", [*A, 1])
    assert read_tail(cache, b"a") == (0, bytes(10))


def test_a_tail_of_other_tokens_is_a_miss(cache: PrefixCache, store: KeyedStore) -> None:
    """As left by a crash between the entry and its tail: other tokens, or others before them."""
    tail = random_blocks(1, block=10)[0]
    cache.retain(b"a", [*A, 1], tail)
    old = store.get(b"tail:a")
    assert old is not None
    for tokens in ([*A, 2], [*B, 1], [*A, 1, 1], A):
        cache.retain(b"a", tokens)
        store.put(b"tail:a", old)
        assert read_tail(cache, b"a") == (0, bytes(10))
    cache.retain(b"a", [*A, 1])
    store.put(b"tail:a", old)
    assert read_tail(cache, b"a") == (1, tail.tobytes())


def test_a_tail_of_another_size_is_a_miss(cache: PrefixCache) -> None:
    cache.retain(b"a", [*A, 1], random_blocks(1, block=10)[0])
    for size in (0, 9, 11, 100):
        assert read_tail(cache, b"a", size) == (0, bytes(size))


def test_a_refused_name_changes_nothing(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = random_blocks(1, block=10)[0]
    cache.put(A, random_blocks(5))
    cache.retain(b"a", [*A, 1], tail)
    before = contents(store)
    monkeypatch.setattr(store, "put", lambda key, value: False)
    assert not cache.retain(b"a", B)
    assert not cache.retain(b"b", A)
    assert contents(store) == before
    monkeypatch.undo()
    cache.forget(b"a")
    assert contents(store) == {}


def test_a_refused_tail_refuses_the_name_and_changes_nothing(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tails = store.put, random_blocks(2, block=10)
    cache.retain(b"a", [*A, 1], tails[0])
    before = contents(store)
    monkeypatch.setattr(store, "put", lambda key, value: key[:5] != b"tail:" and put(key, value))
    assert not cache.retain(b"a", [*A, 2], tails[1])
    assert not cache.retain(b"b", [*A, 2], tails[1])
    assert contents(store) == before
    assert read_tail(cache, b"a") == (1, tails[0].tobytes())


def test_a_refused_entry_never_shows_the_tail_of_other_tokens(
    cache: PrefixCache, store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tails = store.put, random_blocks(2, block=10)
    cache.retain(b"a", [*A, 1], tails[0])
    monkeypatch.setattr(store, "put", lambda key, value: key[:5] == b"tail:" and put(key, value))
    assert not cache.retain(b"a", [*A, 2], tails[1])
    assert read_tail(cache, b"a") == (0, bytes(10))
    found = cache.find(b"a")
    assert found is not None
    assert found.tokens.tolist() == [*A, 1]
    assert not cache.retain(b"b", [*A, 2], tails[1])
    assert list(store.keys(b"tail:")) == []


def test_names_survive_reopening(tmp_path: Path) -> None:
    """More of them than are read at once; the last one listed is the last to go."""
    with open_store(tmp_path) as store:
        cache = make_cache(store)
        cache.put(A, random_blocks(5, 1))
        for i in range(70):
            cache.retain(b"%d" % i, A)
    with open_store(tmp_path) as store:
        cache = make_cache(store)
        names = cache.names()
        assert sorted(names) == sorted(b"%d" % i for i in range(70))
        for name in names[:-1]:
            cache.forget(name)
        assert stored_blocks(store) == set(keys_of(A, 4))
        cache.forget(names[-1])
        assert stored_blocks(store) == set()


def test_all_caches_of_a_store_count_the_same_names(store: KeyedStore) -> None:
    """Each with counts of its own would delete what the other's names hold."""
    one, other = make_cache(store), make_cache(store)
    one.put(A, random_blocks(5))
    one.retain(b"a", A)
    other.retain(b"b", A)
    one.forget(b"a")
    assert stored_blocks(store) == set(keys_of(A, 4))
    one.forget(b"b")
    assert stored_blocks(store) == set()


def test_a_name_that_the_store_lost_holds_nothing(cache: PrefixCache, store: KeyedStore) -> None:
    cache.put(A, random_blocks(5))
    cache.retain(b"a", A)
    cache.retain(b"b", A)
    store.delete(b"prefix:b")
    assert cache.names() == [b"a"]
    cache.forget(b"a")
    assert stored_blocks(store) == set()


def test_a_lost_name_does_not_keep_what_another_gives_up(
    cache: PrefixCache, store: KeyedStore
) -> None:
    cache.put(A, random_blocks(5))
    cache.retain(b"a", A)
    cache.retain(b"b", A)
    store.delete(b"prefix:b")
    cache.retain(b"a", A[:8])
    assert stored_blocks(store) == set(keys_of(A, 4)[:2])


def test_a_lost_name_can_still_be_forgotten(cache: PrefixCache, store: KeyedStore) -> None:
    """It is unknown by then, so its blocks have no holder and stay until they are evicted."""
    cache.put(A, random_blocks(5))
    cache.retain(b"a", [*A, 1], random_blocks(1, block=10)[0])
    store.delete(b"prefix:a")
    assert not cache.forget(b"a")
    assert stored_blocks(store) == set(keys_of(A, 4))
    assert b"tail:a" not in store


@pytest.mark.usefixtures("colliding")
def test_a_name_that_holds_a_block_twice_holds_it_once_forgotten_no_more(
    cache: PrefixCache, store: KeyedStore
) -> None:
    cache.put(A, random_blocks(5))
    cache.retain(b"a", A)
    cache.retain(b"b", A[:4])
    cache.forget(b"a")
    assert stored_blocks(store) == {bytes(16)}
    cache.forget(b"b")
    assert stored_blocks(store) == set()


def entry() -> bytes:
    ids = np.arange(9, dtype=np.uint32)
    return NamedPrefix(ids, hash_blocks(ids, 4, extra=b"x"), 4, 64, b"x").pack()


def test_an_entry_has_the_documented_bytes() -> None:
    sizes = struct.pack("<5I", 9, 2, 4, 64, 1)
    ids = struct.pack("<9I", *range(9))
    keys = b"".join(keys_of(range(9), 4, extra=b"x"))
    assert entry() == b"TSname\x00\x01" + sizes + b"x" + ids + keys


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        entry()[:20],
        entry()[:-1],
        entry() + b"\x00",
        b"X" + entry()[1:],
        entry()[:7] + b"\x02" + entry()[8:],
        entry()[:8] + struct.pack("<5I", 9, 2, 0, 64, 1) + entry()[28:],
        entry()[:8] + struct.pack("<5I", 9, 2, 3, 64, 1) + entry()[28:],
        entry()[:8] + b"\xff" * 20 + entry()[28:],
    ],
)
def test_what_is_no_entry_is_no_name(store: KeyedStore, bad: bytes) -> None:
    store.put(b"prefix:bad", bad)
    cache = make_cache(store)
    cache.put(A, random_blocks(5))
    assert cache.find(b"bad") is None
    assert read_tail(cache, b"bad") == (0, bytes(10))
    assert cache.retain(b"bad", A)
    assert cache.forget(b"bad")
    assert contents(store) == {}


@pytest.mark.parametrize("name", [b"", b"x" * 501, "text", None])
def test_a_bad_name_is_refused(cache: PrefixCache, store: KeyedStore, name: bytes) -> None:
    cache.put(A, random_blocks(5))
    before = contents(store)
    for call in (
        lambda: cache.retain(name, A),
        lambda: cache.forget(name),
        lambda: cache.find(name),
        lambda: cache.get_tail_into(name, np.zeros(4, np.uint8)),
    ):
        with pytest.raises(ConfigError, match=r"^name=.*: expected 1 to 500 bytes"):
            call()
    assert contents(store) == before


def test_a_name_of_500_bytes_is_a_key_that_stores_take(store: KeyedStore) -> None:
    name = b"\xff" * 500
    assert make_cache(store).retain(name, [*A, 1], np.ones(4, np.uint8))
    assert max(map(len, store)) <= 511
    assert make_cache(store).names() == [name]


@pytest.mark.parametrize(
    ("tokens", "tail", "message"),
    [
        (A, np.zeros(4, np.uint8), "tail of 4 bytes: these 20 tokens are whole blocks of 4"),
        (A[:3], np.zeros((1, 4), np.uint8), r"tail: expected uint8 .*, found uint8 \[1, 4\]"),
        (A[:3], b"abc", r"tail: expected uint8 \[bytes\], found bytes"),
    ],
)
def test_a_bad_tail_is_refused(
    cache: PrefixCache, store: KeyedStore, tokens: list[int], tail: Bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        cache.retain(b"a", tokens, tail)
    assert contents(store) == {}


# Threads


def test_threads_share_a_cache(cache: PrefixCache, store: KeyedStore) -> None:
    """Each names the prompt and forgets it, while the others do; one keeps it all along."""
    cache.put(A, random_blocks(5))
    cache.retain(b"kept", A[:12])

    def work(worker: int) -> list[list[bytes]]:
        found = []
        for turn in range(200):
            cache.put(A, random_blocks(5))
            cache.retain(b"%d" % worker, A[: 4 * (turn % 6)])
            found.append(read(cache, A))
            cache.forget(b"%d" % worker)
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [found for results in pool.map(work, range(4)) for found in results]
    expected = rows(random_blocks(5))
    assert [found for found in results if found != expected[: len(found)]] == []
    assert min(map(len, results)) >= 3
    assert cache.names() == [b"kept"]
    assert stored_blocks(store) >= set(keys_of(A, 4)[:3])
    cache.retain(b"last", A)
    cache.forget(b"kept")
    cache.forget(b"last")
    assert stored_blocks(store) == set()
