"""No limit is exceeded, as seen from outside: live arrays, pages of the slots, sizes of files."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.errors import CapacityError, ConfigError
from tierstore.memory import Memory
from tierstore.tiers import MmapTier
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierstore.interfaces import Tier
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout

GEOMETRY = Geometry(1, 4, 2, 16, torch.float32, torch.device("cpu"))
SCALE = 0.25


class Scales:
    """Weighs what a memory limit should cover without asking the memory."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Array]] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = np.zeros(shape, dtype)
        self.alive.append(weakref.ref(array))
        return array

    def array_bytes(self) -> int:
        self.alive = [ref for ref in self.alive if ref() is not None]
        return sum(array.nbytes for ref in self.alive if (array := ref()) is not None)


def resident_bytes(buffer: Array) -> int:
    """Bytes of `buffer`, a whole memory map, that occupy pages: the kernel's own account."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-buffer.nbytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(buffer.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(buffer.nbytes), resident) == 0
    return sum(page & 1 for page in resident) * mmap.PAGESIZE


def step(engine: SparseAttention, tokens: int) -> None:
    query, key, value = (torch.randn(1, heads, tokens, 16) for heads in (4, 2, 2))
    engine.attend(0, query, key, value, scale=SCALE)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which pages exist")
def test_two_thousand_new_tokens_stay_within_every_limit(tmp_path: Path) -> None:
    limits = {"fast": 90 * 1024, "dram": 200 * 1024}
    scales = {name: Scales() for name in limits}
    made: list[Tier] = []

    def tiers(layout: BlockLayout) -> Sequence[Tier]:
        made.extend(
            MemoryTier(layout, Memory(limit, name, allocate=scales[name].allocate), name)
            for name, limit in limits.items()
        )
        made.append(MmapTier(layout, tmp_path / "blocks", "1MiB"))
        return made

    engine = SparseAttention(GEOMETRY, budget=0.1, tiers=tiers, window=2.0)
    step(engine, 100)
    for number in range(2_000):
        step(engine, 1)
        for tier in made[:2]:
            assert tier.memory is not None
            slots = tier.capacity * tier.layout.block_bytes
            assert scales[tier.name].array_bytes() + slots <= limits[tier.name]
            if number % 100 == 0:
                pages = resident_bytes(tier.memory.slots)
                assert pages <= -(-slots // mmap.PAGESIZE) * mmap.PAGESIZE
        assert (tmp_path / "blocks").stat().st_size <= 1 << 20
    report = engine.report()
    assert report.context_tokens == 2_100
    assert all(tier.evictions > 0 for tier in report.tiers[:2])
    engine.store.validate()
    engine.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "no memory tier: expected fast=, dram= or both"),
        ({"dram": "12 parsecs"}, "dram='12 parsecs': expected a number and a unit"),
        ({"dram": 0}, "dram=0: expected more than zero bytes"),
        ({"dram": "1MiB", "budget": 0.0}, "budget=0.0: expected a share of the context"),
        ({"dram": "1MiB", "budget": 1.5}, "budget=1.5: expected a share of the context"),
        ({"dram": "1MiB", "budget": 0}, "budget=0: expected a share of the context"),
        ({"dram": "1MiB", "window": 0.5}, "window=0.5: expected at least 1 budget"),
        ({"dram": "1MiB", "preset": "magic"}, "preset='magic': expected one of kvdrive"),
        ({"dram": "1MiB", "disk": "no/such/place"}, "does not exist: create it first"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        SparseAttention(GEOMETRY, **options)
    assert sentence in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dram": "100KiB"}, "dram: the KV cache of this prompt takes"),
        ({"fast": "40KiB", "dram": "4MiB"}, "fast: "),
    ],
)
def test_a_limit_too_small_for_the_prompt_is_named(options: dict[str, Any], sentence: str) -> None:
    engine = SparseAttention(GEOMETRY, **options)
    with pytest.raises(CapacityError, match=sentence):
        step(engine, 2_000)
    engine.close()


def test_after_a_refusal_a_reset_engine_serves_again() -> None:
    engine = SparseAttention(GEOMETRY, dram="300KiB")
    with pytest.raises(CapacityError):
        step(engine, 5_000)
    engine.reset()
    step(engine, 200)
    step(engine, 1)
    assert engine.report().context_tokens == 201
    engine.close()


def test_reset_gives_everything_back(tmp_path: Path) -> None:
    engine = SparseAttention(GEOMETRY, fast="200KiB", dram="1MiB", disk=tmp_path / "kv")
    for _ in range(3):
        step(engine, 600)
        for _ in range(50):
            step(engine, 1)
        engine.reset()
        assert all(sum(tier.used_for.values()) == 0 for tier in engine.report().tiers)
    engine.close()
    assert not (tmp_path / "kv").exists()
