"""What a policy costs on the decode path: taking in a step's scores, and choosing who leaves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tierstore.benchmarks.rounds import Measure, Ratio, alternate
from tierstore.directory import HandleSpace
from tierstore.interfaces import Access, BlockScores, Demand
from tierstore.memory import unlimited
from tierstore.policies import EWMA, LRU, Adaptive, Blend, EwmaUse, Lookahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.benchmarks.rounds import Say
    from tierstore.interfaces import EvictionPolicy, Ids

LAYERS, ROWS = 30, 12
"""As SmolLM2 has them: three KV heads, here of four sequences."""
WINDOWS = (128, 512)
BLOCKS = 2_048
"""Of a row: 8,192 tokens, the longest that the model reads; 512 slots are then two of 12.5 %."""
MISSES = 32
"""Blocks that each row's selection lacks: one in eight, as measured with two budgets."""
STEPS = 4

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LRU, "Lookahead": Lookahead, "EWMA": EWMA, "EwmaUse": EwmaUse, "Blend": Blend,
    "Adaptive": Adaptive,
}  # fmt: skip
_MEASURE = "time of a layer's scores and victims"
_LIMIT_US = "150 µs"

COSTS = {
    _LIMIT_US: "what scores and victims of a layer may take",
    **{
        f"{name}, {window} slots": f"{name}, windows of {window} slots"
        for name in _POLICIES
        for window in WINDOWS
    },
}


def costs(say: Say, rounds: int) -> dict[str, Measure]:
    """Microseconds of `on_access` and `victims` for one layer, the mean over all layers."""
    layers = {
        f"{name}, {window} slots": _Layers(make, window)
        for name, make in _POLICIES.items()
        for window in WINDOWS
    }
    found = alternate(
        {name: each.step_us for name, each in layers.items()},
        rounds,
        lambda number, _: say(f"cost of policies, round {number} of {rounds}: done"),
        warm_up=2,
    )
    return {_MEASURE: Measure("µs", found | {_LIMIT_US: [150.0] * rounds})}


def cost_ratios() -> list[Ratio]:
    """Whether the default keeps to its limit, and what a larger window costs."""
    large, small = (f"Blend, {window} slots" for window in reversed(WINDOWS))
    return [
        Ratio("time of Blend in a layer / 150 µs", _MEASURE, large, _LIMIT_US, at_most=1.0),
        Ratio("Blend, 512 slots / 128 slots", _MEASURE, large, small),
    ]


class _Layers:
    """Every layer's rows in one space, each with a window full of blocks."""

    def __init__(self, make: Callable[[], EvictionPolicy], window: int) -> None:
        self._random = random = np.random.default_rng(0)
        self.policy = make()
        self._window = window
        space = HandleSpace(unlimited())
        self.policy.bind(space)
        self._segments = space.open(LAYERS * ROWS).reshape(LAYERS, ROWS)
        space.extend(self._segments.reshape(-1), BLOCKS)
        everything = [space.all_handles(s) for s in self._segments.reshape(-1).tolist()]
        self._handles: Ids = np.stack(everything).reshape(LAYERS, ROWS, BLOCKS)
        self._unit_of = np.arange(BLOCKS, dtype=np.int32)[None]
        self._scores = random.normal(-8, 2, (LAYERS, ROWS, BLOCKS)).astype(np.float32)
        self._step = 0

    def step_us(self, number: int) -> float:
        """Mean time of a layer over some steps; what the store does is outside of it."""
        seconds = 0.0
        for _ in range(STEPS):
            self._scores += self._random.normal(0, 0.5, self._scores.shape).astype(np.float32)
            for layer in range(LAYERS):
                access, demand = self._step_of(layer)
                start = time.thread_time()
                self.policy.on_access(access)
                self.policy.victims(demand)
                seconds += time.thread_time() - start
        return 1e6 * seconds / (STEPS * LAYERS)

    def _step_of(self, layer: int) -> tuple[Access, Demand]:
        """The best blocks are selected; the window holds them but for the misses, and others."""
        self._step += 1
        scores, window, half = self._scores[layer], self._window, self._window // 2
        best = np.argpartition(-scores, window + MISSES, axis=1)[:, : window + MISSES]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
        handles = np.take_along_axis(self._handles[layer], np.take_along_axis(best, order, 1), 1)
        selected = handles[:, :half]
        access = Access(
            np.arange(ROWS + 1, dtype=np.int64) * half,
            selected.reshape(-1),
            np.take_along_axis(scores, np.take_along_axis(best, order, 1), 1)[:, :half].reshape(-1),
            self._step,
            BlockScores(scores, self._unit_of, self._segments[layer]),
        )
        residents = handles[:, MISSES:]
        demand = Demand(
            domains=self._segments[layer],
            row_ptr=np.arange(ROWS + 1, dtype=np.int64) * window,
            residents=residents.reshape(-1),
            eligible=np.tile(np.arange(window) >= half - MISSES, ROWS),
            need=np.full(ROWS, MISSES, np.int64),
            access=access,
        )
        return access, demand
