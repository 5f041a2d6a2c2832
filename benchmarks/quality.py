"""What sparse attention costs in quality: the distance from full attention, and planted facts.

One prefill fills the engines of all systems and budgets; each then decodes from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.benchmarks.distance import STEPS, distances
from tierstore.benchmarks.facts import BUDGET, FACTS, Fact, answers
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Say
from tierstore.benchmarks.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(say: Say, *, tokens: int = 6_000) -> Findings:
    """Measure SmolLM2-135M-Instruct."""
    say(f"loading {DEMO_MODEL}")
    return measure(say, load_model(DEMO_MODEL), tokens=tokens)


def measure(
    say: Say, loaded: LoadedModel, *, tokens: int, facts: Sequence[Fact] = FACTS
) -> Findings:
    """Measure a model at `tokens` of context, and ask it for `facts`."""
    machine = Machine.here()
    far = distances(say, loaded, tokens)
    answered = answers(say, loaded, tokens, facts)
    found = {name: [float(each.is_right) for each in row] for name, row in answered.items()}
    return Findings(
        benchmark="quality",
        machine=machine,
        baseline="full",
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "context tokens": tokens,
            "steps": STEPS,
            "facts": len(facts),
        },
        configurations={name: system.says for name, system in SYSTEMS.items()},
        measures={
            "KL": Measure("nats, KL(full || sparse) of the next token", far.kl),
            "same token": Measure("1 where full attention's likeliest token is its own", far.same),
            "facts": Measure(f"1 where the number was found, at {BUDGET:.2%}", found),
        },
        details={
            "tiers": far.tiers,
            "answers": {
                name: [each.fact._asdict() | {"text": each.text} for each in row]
                for name, row in answered.items()
            },
        },
    )
