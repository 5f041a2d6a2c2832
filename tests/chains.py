"""Chains of tiers for tests of the store, with members that are late, fail or answer wrongly."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.errors import CapacityError
from tierstore.interfaces import EvictionPolicy, Tier
from tierstore.layout import BlockLayout
from tierstore.tiers import DeviceTier, MmapTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access, Bytes, Completion, Demand, Ids, Pointers

LAYOUT = BlockLayout.kv(2, 3, torch.float16)
BLOCK = LAYOUT.block_bytes


class Later:
    """A transfer that does all its work, or fails, when somebody waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def wait(self) -> None:
        self._work()


class LateTier(Tier):
    """Cannot be read in place, and moves bytes only when waited for."""

    def __init__(self, layout: BlockLayout, limit_bytes: int, name: str = "late") -> None:
        self.name = name
        self.layout = layout
        self._limit = limit_bytes // layout.block_bytes
        self._blocks: Bytes = np.empty((0, layout.block_bytes), np.uint8)

    @property
    def capacity(self) -> int:
        return len(self._blocks)

    @property
    def limit(self) -> int:
        return self._limit

    def resize(self, slots: int) -> None:
        if slots > self._limit:
            raise CapacityError(f"{self.name}: {slots} slots: expected at most {self._limit}")
        resized = np.zeros((slots, self.layout.block_bytes), np.uint8)
        kept = min(slots, self.capacity)
        resized[:kept] = self._blocks[:kept]
        self._blocks = resized

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans, slots, rows = self.layout.spans(parts), slots.copy(), rows.copy()

        def move() -> None:
            for start, stop in spans:
                out[rows, start:stop] = self._blocks[slots, start:stop]

        return Later(move)

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans, slots, rows = self.layout.spans(parts), slots.copy(), rows.copy()

        def move() -> None:
            for start, stop in spans:
                self._blocks[slots, start:stop] = blocks[rows, start:stop]

        return Later(move)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self.resize(0)


def make_tier(kind: str, limit_bytes: int, folder: Path, number: int = 0) -> Tier:
    """A tier of a chain; its name says which."""
    name = f"{kind}{number}"
    if kind == "mmap":
        return MmapTier(LAYOUT, folder / name, limit_bytes, name=name)
    if kind == "late":
        return LateTier(LAYOUT, limit_bytes, name)
    if kind == "device":
        return DeviceTier(LAYOUT, limit_bytes, name=name)
    return PinnedTier(LAYOUT, limit_bytes, name=name)


@contextmanager
def failing(tier: Tier, operation: str, *, late: bool) -> Iterator[list[str]]:
    """Every `operation` of a tier is an I/O error meanwhile; yields what was refused so far."""
    refused: list[str] = []

    def fail() -> None:
        refused.append(operation)
        raise OSError(5, f"{tier.name} does not {operation}")

    def start(*_: object, **__: object) -> Later:
        if not late:
            fail()
        return Later(fail)

    setattr(tier, operation, start)
    try:
        yield refused
    finally:
        delattr(tier, operation)


def _strangers(demand: Demand) -> Ids:
    return np.setdiff1d(np.arange(64, dtype=np.int32), demand.residents)


MISTAKES: dict[str, Callable[[Ids, Demand], list[int] | Ids]] = {
    "too few": lambda right, demand: right[:-1],
    "too many": lambda right, demand: [*right, right[0]],
    "twice": lambda right, demand: [right[0], *right[:-1]] if len(right) > 1 else [],
    "other domain first": lambda right, demand: right[::-1] if (demand.need > 0).sum() > 1 else [],
    "not eligible": lambda right, demand: [
        *demand.residents[~demand.eligible][:1],
        *right[1:],
    ],
    "not resident": lambda right, demand: [*_strangers(demand)[:1], *right[1:]],
    "negative": lambda right, demand: [-1, *right[1:]],
    "unknown": lambda right, demand: [1 << 30, *right[1:]],
}
"""Wrong answers made of a right one and its demand; a shorter one than intended is just too few."""


class Unruly(EvictionPolicy):
    """Answers as another policy does, or with a mistake while told to make one."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.mistake: str | None = None
        self.mistakes = 0
        self.removed: list[int] = []

    def bind(self, space: HandleSpace) -> None:
        self._policy.bind(space)

    def on_capacity(self, domains: Ids, blocks: Pointers) -> None:
        self._policy.on_capacity(domains, blocks)

    def on_access(self, access: Access) -> None:
        self._policy.on_access(access)

    def on_admit(self, handles: Ids, domains: Ids) -> None:
        self._policy.on_admit(handles, domains)

    def on_evict(self, handles: Ids) -> None:
        self._policy.on_evict(handles)

    def on_remove(self, handles: Ids) -> None:
        self.removed += handles.tolist()
        self._policy.on_remove(handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        self._policy.on_close(segments, domains)

    def victims(self, demand: Demand) -> Ids:
        right = self._policy.victims(demand)
        if self.mistake is None or not len(right):
            return right
        self.mistakes += 1
        return np.array(MISTAKES[self.mistake](right, demand), np.int32)
