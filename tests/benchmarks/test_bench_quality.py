"""The quality benchmark on a tiny model, and the engine of engines that it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from bench_schema import as_json

from tierstore.adapters.generate import next_logits, own_cache
from tierstore.benchmarks.distance import BUDGETS, STEPS
from tierstore.benchmarks.facts import Answer, Fact
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.quality import measure
from tierstore.benchmarks.systems import SPARSE, SYSTEMS, attached, named
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.adapters.models import LoadedModel

FACTS = (Fact("Rome", 12_345, 0.2), Fact("Bonn", 54_321, 0.8))


def test_measures_every_system_at_every_budget(tiny_model: LoadedModel) -> None:
    said: list[str] = []
    data = as_json(measure(said.append, tiny_model, tokens=1_200, facts=FACTS))

    everything = {named(system, budget) for system in SPARSE for budget in BUDGETS}
    for name in ("KL", "same token"):
        values = data["measures"][name]["values"]
        assert set(values) == everything
        assert {len(each) for each in values.values()} == {STEPS}
    assert min(data["measures"]["KL"]["spread"][name]["min"] for name in everything) > -1e-6
    assert set(data["details"]["tiers"]) == everything

    found = data["measures"]["facts"]["values"]
    assert set(found) == set(SYSTEMS) == set(data["configurations"])
    for name, answers in data["details"]["answers"].items():
        assert [answer["city"] for answer in answers] == ["Rome", "Bonn"]
        right = [float(str(answer["number"]) in answer["text"]) for answer in answers]
        assert right == found[name]
    assert said[-1].startswith("fact about Bonn: ")


def test_an_answer_is_right_when_the_number_is_in_it() -> None:
    assert Answer(FACTS[0], " 12345.").is_right
    assert not Answer(FACTS[0], " 1234").is_right


def test_alternatives_hold_the_same_text(tiny_model: LoadedModel) -> None:
    """With the whole context as budget, each of them computes full attention."""
    model, text = tiny_model.model, real_text(tiny_model.tokenizer, 640)
    context, forced = text[:600], text[600:]
    own = own_cache(model)
    next_logits(model, context, own)
    expected = [next_logits(model, [token], own) for token in forced]
    with attached(model, 640, [(system, 1.0) for system in SYSTEMS]) as (cache, engines):
        next_logits(model, context, cache.kwargs)
        for name in engines.names:
            engines.choose(name)
            for token, full in zip(forced, expected, strict=True):
                found = next_logits(model, [token], cache.kwargs)
                torch.testing.assert_close(found, full, rtol=1e-3, atol=1e-3)
            assert cache.report().context_tokens == 640
            cache.crop(-len(forced))
        cache.reset()
        again = next_logits(model, text, cache.kwargs)
        torch.testing.assert_close(again, expected[-1], rtol=1e-3, atol=1e-3)


def test_an_unknown_alternative_is_refused(tiny_model: LoadedModel) -> None:
    with attached(tiny_model.model, 64, [("exact", 0.5)]) as (_, engines):
        assert engines.names == ("exact 50%",)
        with pytest.raises(ConfigError, match="expected one of exact 50%"):
            engines.choose("full 100%")
