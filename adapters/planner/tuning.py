"""Picks centroids, window and micro-batch that are fastest on this machine (K13–K15)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.adapters.planner.pipelining import Stage, layer_seconds
from tierstore.adapters.planner.stages import LayerStages, Times
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.indexers import HierarchicalIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.presets import Preset

    Say = Callable[[str], None]

TOKENS_PER_CENTROID = (8.0, 12.0, 15.0, 24.0, 32.0)
WINDOWS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
NEARLY = 0.97
"""Share of the most attention found by any candidate that one must find to be chosen."""


class Sample(NamedTuple):
    """What one layer of a model saw: a prompt, and steps after it.

    key, value: [Hkv, n, .]. queries: [T, Hkv, G, d]. last_queries: [Hkv, G, w, d] of the prompt.
    """

    key: torch.Tensor
    value: torch.Tensor
    queries: torch.Tensor
    last_queries: torch.Tensor


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes
    ----------
    times: of a layer's stages for one micro-batch, the mean over layers. seconds: what is to be
        least. found: share of the attention that as many best blocks would get; None if not asked.
    """

    setting: float
    times: Times
    seconds: float
    found: float | None = None


@dataclass(frozen=True)
class Tuned:
    """The settings chosen, and all that was tried."""

    tokens_per_centroid: float | None
    window: float
    micro_batch: int
    trials: Mapping[str, Sequence[Trial]]


class Tuner:
    """Tries settings of one preset on samples of a model.

    Parameters
    ----------
    budget: tokens that a step selects for each KV head.
    files: directory of the disk under the fast tier; None for DRAM under it.
    """

    def __init__(
        self,
        geometry: Geometry,
        preset: Preset,
        samples: Sequence[Sample],
        *,
        budget: int,
        scale: float,
        files: str | Path | None = None,
        say: Say = lambda _: None,
    ) -> None:
        if not samples or min(len(sample.queries) for sample in samples) < 4:
            raise ConfigError("tuning: expected at least one layer with at least 4 steps")
        self._geometry, self._preset, self._samples = geometry, preset, samples
        self._budget, self._scale, self._files, self._say = budget, scale, files, say

    def tune(self, batch: int, window: float | None = None) -> Tuned:
        """All three, each with what was chosen before it; `window` if it is given."""
        trials: dict[str, list[Trial]] = {}
        preset, tokens = self._preset, None
        if preset.index is HierarchicalIndex:
            trials["tokens per centroid"] = found = self.centroids()
            tokens = best_centroids(found).setting
            self._preset = with_centroids(preset, tokens)
        if window is None:
            trials["window"] = grown = self.windows()
            window = balanced(grown).setting
        trials["micro-batch"] = tried = self.micro_batches(batch, window)
        self._preset = preset
        return Tuned(tokens, window, round(fastest(tried).setting), trials)

    def centroids(self) -> list[Trial]:
        """Every number of centroids, with a window of two budgets."""
        trials = []
        for tokens in TOKENS_PER_CENTROID:
            self._say(f"{tokens:g} tokens for each centroid")
            preset = with_centroids(self._preset, tokens)
            times, found = self._run(preset, 2.0, 1, measures_found=True)
            trials.append(Trial(tokens, times, _total(times), found))
        return trials

    def windows(self) -> list[Trial]:
        """Windows from the smallest on, until judging takes as long as fetching."""
        trials: list[Trial] = []
        for window in WINDOWS:
            self._say(f"a window of {window:g} budgets")
            times, _ = self._run(self._preset, window, 1)
            trials.append(Trial(window, times, _total(times)))
            if times.fetch <= times.judge:
                break
        return trials

    def micro_batches(self, batch: int, window: float) -> list[Trial]:
        """Every size that divides the batch, with its stages overlapped."""
        trials = []
        for size in MICRO_BATCHES:
            if size > batch or batch % size:
                continue
            self._say(f"micro-batches of {size}")
            times, _ = self._run(self._preset, window, size)
            # The processor selects, judges and copies; only a disk works beside it.
            fetch = "host" if self._files is None else "disk"
            stages = [
                Stage("host", times.select), Stage("host", times.judge), Stage(fetch, times.fetch)
            ]  # fmt: skip
            count = batch // size
            seconds = layer_seconds("sfc", stages, times.attend * count, count)
            trials.append(Trial(size, times, seconds))
        return trials

    def _run(
        self, preset: Preset, window: float, sequences: int, *, measures_found: bool = False
    ) -> tuple[Times, float | None]:
        """Mean over the samples of the stages' times, and of the attention found."""
        times, found = [], []
        for sample in self._samples:
            directory = None if self._files is None else PrivateDirectory(self._files)
            try:
                stages = LayerStages(
                    self._geometry, preset, sample.key, sample.value, sample.last_queries,
                    budget=self._budget, window=window, sequences=sequences, scale=self._scale,
                    files=None if directory is None else directory.path,
                )  # fmt: skip
                try:
                    times.append(self._steps(stages, sample, sequences))
                    if measures_found:
                        found.append(self._found(stages, sample))
                finally:
                    stages.close()
            finally:
                if directory is not None:
                    directory.close()
        mean = Times(
            *(float(np.mean(column)) for column in zip(*map(_columns, times), strict=True))
        )
        return mean, float(np.mean(found)) if found else None

    def _steps(self, stages: LayerStages, sample: Sample, sequences: int) -> Times:
        """The stages of a step, once the fast tier is warm."""
        steps = [stages.step(query.repeat(sequences, 1, 1)) for query in sample.queries]
        return Times.median(steps[len(steps) // 3 :])

    def _found(self, stages: LayerStages, sample: Sample) -> float:
        """Attention that selected blocks get, of what as many best blocks would get."""
        size = self._preset.block_tokens
        first = self._preset.sinks
        shares = []
        for query in sample.queries[:: max(1, len(sample.queries) // 8)]:
            logits = query.float() @ sample.key.float().transpose(1, 2) * self._scale
            mass = logits.softmax(-1).mean(1)[:, first:].numpy()
            for row, blocks in enumerate(stages.selected(query)):
                whole = mass.shape[1] // size * size
                each = mass[row, :whole].reshape(-1, size).sum(1)
                each = each[: stages.blocks]
                best = np.sort(each)[::-1][: len(blocks)].sum()
                shares.append(float(each[blocks].sum() / max(best, 1e-30)))
        return float(np.mean(shares))


def with_centroids(preset: Preset, tokens: float) -> Preset:
    """The preset with so many context tokens for each centroid."""
    return replace(preset, index=partial(HierarchicalIndex, tokens_per_centroid=tokens))


def best_centroids(trials: Sequence[Trial]) -> Trial:
    """The fastest of those that find nearly as much attention as the one that finds most."""
    most = max(trial.found or 0.0 for trial in trials)
    return fastest([trial for trial in trials if (trial.found or 0.0) >= NEARLY * most])


def balanced(trials: Sequence[Trial]) -> Trial:
    """The first window with which fetching takes no longer than judging; else the fastest."""
    for trial in trials:
        if trial.times.fetch <= trial.times.judge:
            return trial
    return fastest(trials)


def fastest(trials: Sequence[Trial]) -> Trial:
    """The one that takes least; of equals the first."""
    return min(trials, key=lambda trial: trial.seconds)


def _total(times: Times) -> float:
    return times.select + times.judge + times.fetch + times.attend


def _columns(times: Times) -> list[float]:
    return list(vars(times).values())
