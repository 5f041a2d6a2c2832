"""Ten thousand steps: memory stays flat, its accountant right, and the output exact.

Sequences of random length run side by side through three tiers. When one is long enough it leaves
and another joins, so that the amount stored stays much the same for as long as one likes; tokens
become blocks, move down, and are fetched again all the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.reference_text import ReferenceText
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.benchmarks.weighed import WeighedTier, resident_bytes
from tierstore.tiers import MmapTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout

GEOMETRY = Geometry(2, 4, 2, 16, torch.float32, torch.device("cpu"))
SCALE = 0.25
BUDGET = 1 / 16
SEQUENCES = 4
PROMPT, LONGEST = (64, 900), 1_200
"""Tokens of a prompt, at least and at most, and of a sequence when it leaves."""

FAST, DRAM = 2_500 << 10, 768 << 10
"""Bytes: too little for the windows, and for the blocks, of all sequences."""

SAMPLES = 100
_SEED = 0

_RATIOS = (
    Ratio("resident memory, second half / first half", "memory", "late", "early", at_most=1.02),
    Ratio("time of a step, second half / first half", "step", "late", "early", at_most=1.1),
)
CONFIGURATIONS = {
    "early": "the first half of the steps after the first tenth, which warms up",
    "late": "the second half of these steps",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one step.

    resident: bytes of the process. drift: bytes between accountant and truth. error: the largest
    difference from the reference. step_ms: median time of the steps since the sample before.
    """

    resident: int
    drift: int
    error: float
    step_ms: float


def run(say: Say, *, steps: int = 10_000, disk: str | Path | None = None) -> Findings:
    """Run so many steps, with a disk tier in the directory `disk`."""
    folder = Path(disk or tempfile.gettempdir())
    file_system = file_system_of(folder)
    machine = Machine.here()
    with tempfile.TemporaryDirectory(dir=folder) as place, closing(Run(Path(place))) as course:
        course.go(say, steps)
        samples, report = course.samples, course.engine.report().to_dict()
    half = len(samples) // 2
    halves = {"early": samples[:half], "late": samples[half : 2 * half]}
    return Findings(
        benchmark="endurance",
        machine=machine,
        baseline="early",
        settings={
            "steps": steps,
            "sequences at once": SEQUENCES,
            "tokens of a sequence": LONGEST,
            "samples": len(samples),
            "file system of the disk tier": file_system,
            "seed": _SEED,
        },
        configurations=CONFIGURATIONS,
        measures={
            "memory": Measure(
                "MiB of the process, at each sample",
                {name: [each.resident / 2**20 for each in part] for name, part in halves.items()},
            ),
            "step": Measure(
                "ms, median between two samples",
                {name: [each.step_ms for each in part] for name, part in halves.items()},
            ),
        },
        ratios=_RATIOS,
        notes=[_outputs(samples), _accounts(samples, course.finished + SEQUENCES)],
        details={
            "worst error": max(each.error for each in samples),
            "worst drift in bytes": max(each.drift for each in samples),
            "finished": course.finished,
            "tiers": report,
        },
    )


def _outputs(samples: Sequence[Sample]) -> str:
    worst = max(each.error for each in samples)
    return (
        f"Largest difference from the float64 reference in {len(samples)} sampled steps: "
        f"{worst:.1e}, of outputs around 1."
    )


def _accounts(samples: Sequence[Sample], sequences: int) -> str:
    drift = max(each.drift for each in samples)
    return (
        f"Largest difference between a tier's accountant and its live arrays and slots: {drift} "
        f"bytes. Sequences that ran: {sequences}."
    )


@dataclass(slots=True)
class _Token:
    """Queries, keys and values [layers, B, heads, 1, d] of one step."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seconds: float = 0.0
    outputs: list[torch.Tensor] = field(default_factory=list)


class Run:
    """Sequences in an engine, each beside its reference."""

    def __init__(self, folder: Path) -> None:
        self.tiers: list[WeighedTier] = []

        def tiers(layout: BlockLayout) -> Sequence[Tier]:
            self.tiers = [WeighedTier(layout, FAST, "fast"), WeighedTier(layout, DRAM, "dram")]
            return [*self.tiers, MmapTier(layout, folder / "blocks", "64MiB")]

        self._preset = PRESETS["exact"]
        self.engine = SparseAttention(
            GEOMETRY, preset=self._preset, budget=BUDGET, tiers=tiers, window=2.0
        )
        self._random = torch.Generator().manual_seed(_SEED)
        self._texts: dict[int, ReferenceText] = {}
        self.samples: list[Sample] = []
        self.finished = 0

    def go(self, say: Say, steps: int) -> None:
        """Make steps; after the first tenth, look at some in regular distances."""
        first, every = steps // 10, max(1, (steps - steps // 10) // SAMPLES)
        seconds: list[float] = []
        for number in range(1, steps + 1):
            self._join()
            token = self._step()
            seconds.append(token.seconds)
            if number > first and (number - first) % every == 0:
                self.samples.append(self._sample(token, seconds))
                seconds = []
            if number % max(1, steps // 10) == 0:
                say(f"step {number:,} of {steps:,}")
            for text in self._texts.values():
                text.after_step()
        self.engine.store.validate()

    def close(self) -> None:
        """Free memory and files."""
        self.engine.close()

    def _join(self) -> None:
        """Let those leave that are long enough, and others join."""
        for sequence in [each for each, text in self._texts.items() if len(text) >= LONGEST]:
            self.engine.finish(sequence)
            del self._texts[sequence]
            self.finished += 1
        while len(self._texts) < SEQUENCES:
            tokens = int(torch.randint(*PROMPT, (1,), generator=self._random))
            sequence = self.engine.add_sequence(LONGEST)
            text = ReferenceText(GEOMETRY, self._preset, BUDGET, SCALE)
            prompt = self._tokens(1, tokens)
            for layer in range(GEOMETRY.layers):
                self.engine.attend(
                    layer, prompt.query[layer], prompt.key[layer], prompt.value[layer],
                    sequences=[sequence], scale=SCALE,
                )  # fmt: skip
            text.append(prompt.key[:, 0], prompt.value[:, 0])
            self._texts[sequence] = text

    def _step(self) -> _Token:
        token, texts = self._tokens(len(self._texts), 1), list(self._texts.values())
        for place, text in enumerate(texts):
            text.append(token.key[:, place], token.value[:, place])
        start = time.perf_counter()
        for layer in range(GEOMETRY.layers):
            out = self.engine.step(
                layer, token.query[layer], token.key[layer], token.value[layer],
                sequences=list(self._texts), scale=SCALE,
            )  # fmt: skip
            token.outputs.append(out[:, 0])
        token.seconds = time.perf_counter() - start
        return token

    def _sample(self, token: _Token, seconds: Sequence[float]) -> Sample:
        outputs = torch.stack(token.outputs, 1).double().numpy()
        errors = [
            float(np.abs(outputs[place] - text.attention(token.query[:, place, :, 0])).max())
            for place, text in enumerate(self._texts.values())
        ]
        drift = 0
        for tier in self.tiers:
            assert tier.memory is not None
            drift = max(drift, abs(tier.memory.used_bytes - tier.true_bytes))
        return Sample(resident_bytes(), drift, max(errors), 1e3 * statistics.median(seconds))

    def _tokens(self, sequences: int, count: int) -> _Token:
        shape = GEOMETRY

        def normal(heads: int, width: int) -> torch.Tensor:
            return torch.randn(shape.layers, sequences, heads, count, width, generator=self._random)

        query = normal(shape.query_heads, shape.head_dim)
        key, value = (normal(shape.kv_heads, d) for d in (shape.head_dim, shape.value_size))
        return _Token(query, key, value)
