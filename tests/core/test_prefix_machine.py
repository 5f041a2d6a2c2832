"""Prompts and names in any order against dictionaries, while the store loses what it likes."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxh3 import xxh3_128

from tierstore.identity import Identity
from tierstore.io import FileIO
from tierstore.keyed import KeyedStore
from tierstore.prefix import PrefixCache

TOKENS = 2
"""Of a block."""

BLOCK, TAIL = 24, 11

MEMORY = Path("/dev/shm")
"""Making and removing files of hundreds of stores would take most of the time on a disk."""

Block = tuple[bytes, tuple[int, ...]]
"""Extra, and all tokens to the end of the block."""

prompts = st.lists(st.integers(0, 1), max_size=9).map(tuple)
"""Two kinds of tokens and few of them, so that most prompts begin like others."""

extras = st.sampled_from([b"", b"lora"])
names = st.sampled_from([b"a", b"b", b"c"])
seeds = st.integers(0, 2**32 - 1)


class Name(NamedTuple):
    extra: bytes
    tokens: tuple[int, ...]
    tail: bytes


def blocks_of(extra: bytes, tokens: tuple[int, ...]) -> list[Block]:
    ends = range(TOKENS, len(tokens) + 1, TOKENS)
    return [(extra, tokens[:end]) for end in ends]


def key_of(block: Block) -> bytes:
    """Where the store has a block, from the description of `hash_blocks`."""
    extra, tokens = block
    key = b""
    for at in range(0, len(tokens), TOKENS):
        sizes = struct.pack("<3I", len(key), TOKENS, len(extra))
        ids = struct.pack(f"<{TOKENS}I", *tokens[at : at + TOKENS])
        key = xxh3_128(b"tierstore.prefix" + sizes + key + ids + extra)
    return b"block:%dx%d:" % (TOKENS, BLOCK) + key


def random_bytes(seed: int, count: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


class Unsynced(FileIO):
    """Never waits for the disk: nothing here loses power."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class PrefixMachine(RuleBasedStateMachine):
    """`blocks` has what must be stored, `named` what each name stands for."""

    @initialize(dram=st.sampled_from([None, "128KiB", "1MiB"]))
    def build(self, dram: str | None) -> None:
        self.blocks: dict[Block, bytes] = {}
        self.named: dict[bytes, Name] = {}
        self.folder = TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.dram = dram
        self.open()

    def open(self) -> None:
        path = Path(self.folder.name) / "store"
        self.store = KeyedStore(
            path, Identity(), disk="3MiB", segment="64KiB", dram=self.dram, io=Unsynced()
        )
        self.cache = PrefixCache(self.store, block_tokens=TOKENS, block_bytes=BLOCK)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule()
    def reopen(self) -> None:
        """What counted references is gone; the entries remain."""
        self.store.close()
        self.open()

    @rule(tokens=prompts, extra=extras, seed=seeds, skipped=st.integers(0, 2))
    def put(self, tokens: tuple[int, ...], extra: bytes, seed: int, skipped: int) -> None:
        chain = blocks_of(extra, tokens)
        skipped = min(skipped, len(chain))
        given = random_bytes(seed, len(chain) - skipped, BLOCK)
        new = {
            block: content.tobytes()
            for block, content in zip(chain[skipped:], given, strict=True)
            if block not in self.blocks
        }
        assert self.cache.put(tokens, given, first=skipped, extra=extra) == len(new)
        self.blocks.update(new)

    @rule(name=names, tokens=prompts, extra=extras, seed=seeds)
    def retain(self, name: bytes, tokens: tuple[int, ...], extra: bytes, seed: int) -> None:
        tail = random_bytes(seed, 1, TAIL)[0] if len(tokens) % TOKENS else None
        assert self.cache.retain(name, tokens, tail, extra=extra)
        before = self.named.get(name)
        self.named[name] = Name(extra, tokens, b"" if tail is None else tail.tobytes())
        self.drop_unheld(before)

    @rule(name=names)
    def forget(self, name: bytes) -> None:
        before = self.named.pop(name, None)
        assert self.cache.forget(name) == (before is not None)
        self.drop_unheld(before)

    def drop_unheld(self, before: Name | None) -> None:
        """Take what `before` held out of the model, as far as no name holds it now."""
        if before is None:
            return
        held = {block for name in self.named.values() for block in blocks_of(*name[:2])}
        for block in blocks_of(before.extra, before.tokens):
            if block not in held:
                self.blocks.pop(block, None)

    @precondition(lambda self: self.blocks)
    @rule(seed=seeds)
    def evict_a_block(self, seed: int) -> None:
        block = list(self.blocks)[seed % len(self.blocks)]
        assert self.store.delete(key_of(block))
        del self.blocks[block]

    @precondition(lambda self: self.named)
    @rule(seed=seeds)
    def evict_a_name(self, seed: int) -> None:
        """It holds nothing any more, and its blocks are still there."""
        name = list(self.named)[seed % len(self.named)]
        assert self.store.delete(b"prefix:" + name)
        del self.named[name]

    @precondition(lambda self: self.named)
    @rule(seed=seeds)
    def evict_a_tail(self, seed: int) -> None:
        name = list(self.named)[seed % len(self.named)]
        self.store.delete(b"tail:" + name)
        self.named[name] = self.named[name]._replace(tail=b"")

    @rule(tokens=prompts, extra=extras, room=st.integers(0, 5))
    def read(self, tokens: tuple[int, ...], extra: bytes, room: int) -> None:
        run = self.run(extra, tokens)
        out = np.full((room, BLOCK), 0xEE, np.uint8)
        assert self.cache.match(tokens, extra=extra) == len(run)
        assert self.cache.get_into(tokens, out, extra=extra) == min(len(run), room)
        assert out.tobytes() == b"".join(run)[: out.nbytes].ljust(out.nbytes, b"\xee")
        with self.cache.lease(tokens, owner="test", seconds=600, extra=extra) as lease:
            assert [bytes(block) for block in lease.blocks] == run

    def run(self, extra: bytes, tokens: tuple[int, ...]) -> list[bytes]:
        """The contents of the blocks from the start that the store must have."""
        contents = []
        for block in blocks_of(extra, tokens):
            if block not in self.blocks:
                break
            contents.append(self.blocks[block])
        return contents

    @invariant()
    def the_store_has_exactly_the_blocks_of_the_model(self) -> None:
        if hasattr(self, "store"):
            assert set(self.store.keys(b"block:")) == {key_of(block) for block in self.blocks}

    @invariant()
    def the_store_has_exactly_the_names_of_the_model(self) -> None:
        if hasattr(self, "store"):
            assert sorted(self.cache.names()) == sorted(self.named)

    @rule(name=names)
    def look_up(self, name: bytes) -> None:
        expected, found = self.named.get(name), self.cache.find(name)
        assert (found is None) == (expected is None)
        tail = np.zeros(TAIL, np.uint8)
        count = self.cache.get_tail_into(name, tail)
        assert count == (len(expected.tokens) % TOKENS if expected and expected.tail else 0)
        assert tail.tobytes() == (expected.tail if count and expected else bytes(TAIL))
        if found and expected:
            assert (found.extra, tuple(found.tokens.tolist())) == expected[:2]


PrefixMachine.TestCase.settings = settings(stateful_step_count=25)
TestPrefixCache = PrefixMachine.TestCase
