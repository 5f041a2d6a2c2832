"""Timing of steps that are alike, and what is said about them round by round."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tierstore.benchmarks.rounds import Measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

STEPS = 32
"""Steps of a round. Once in so many tokens some leave the local window, become blocks and are
indexed (presets with blocks of 4); so every round has that once, and its mean step is the cost."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one round.

    Attributes
    ----------
    seconds: of each step.
    page_faults: memory pages that the system had to provide meanwhile; many of them mean that an
        allocator gives memory back and asks for it again.
    """

    seconds: Sequence[float]
    page_faults: int

    @property
    def median_ms(self) -> float:
        """What a step usually takes."""
        return 1e3 * statistics.median(self.seconds)

    @property
    def mean_ms(self) -> float:
        """What a step takes with the work that comes only now and then."""
        return 1e3 * statistics.fmean(self.seconds)


def time_steps(step: Callable[[T], object], inputs: Iterable[T]) -> Steps:
    """Call `step` with one input after the other."""
    seconds = []
    faults = _page_faults()
    for each in inputs:
        start = time.perf_counter()
        step(each)
        seconds.append(time.perf_counter() - start)
    return Steps(seconds, _page_faults() - faults)


def step_measures(
    results: Mapping[str, Sequence[Steps]], name: str, unit: str
) -> dict[str, Measure]:
    """Measures with one value for each round: `name`, its mean, and page faults."""

    def measure(unit: str, value: Callable[[Steps], float]) -> Measure:
        rounds = {key: [value(steps) for steps in each] for key, each in results.items()}
        return Measure(unit, rounds)

    return {
        name: measure(f"{unit}, median of a round", lambda steps: steps.median_ms),
        f"{name} mean": measure(f"{unit}, mean of a round", lambda steps: steps.mean_ms),
        "page faults": measure("in a step", lambda steps: steps.page_faults / len(steps.seconds)),
    }


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
