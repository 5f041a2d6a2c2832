"""The attention benchmark at tiny sizes, and its synthetic text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from bench_schema import as_json

from tierstore.adapters.attention import Geometry
from tierstore.benchmarks.attention import measure
from tierstore.benchmarks.steps import STEPS
from tierstore.benchmarks.synthetic import SyntheticText
from tierstore.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

GEOMETRY = Geometry(2, 4, 2, 16, torch.bfloat16, torch.device("cpu"))


def test_measures_both_engines_in_the_same_rounds() -> None:
    said: list[str] = []
    data = as_json(measure(said.append, GEOMETRY, repeat=2, tokens=1_000))
    assert set(data["measures"]) == {"attention", "attention mean", "page faults"}
    assert set(data["measures"]["attention"]["values"]) == {"full", "kvdrive"}
    assert [ratio["at_least"] for ratio in data["ratios"]] == [4.0, None]
    reports = data["details"]["tiers"]
    assert {report["context_tokens"] for report in reports.values()} == {1_000 + 3 * STEPS}
    assert reports["kvdrive"]["selected_blocks"] < reports["full"]["selected_blocks"] / 20
    assert said[-1].startswith("round 2 of 2: full ")


def test_too_little_memory_is_said_before_it_is_taken() -> None:
    with pytest.raises(CapacityError, match="pass fewer --layers or --tokens"):
        measure(lambda _: None, GEOMETRY, repeat=1, tokens=10**10)


def steps_of(text: SyntheticText, count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        for token in text.step():
            yield torch.cat(token, 1)


def test_synthetic_text_depends_on_the_seed_only() -> None:
    texts = [SyntheticText(GEOMETRY, seed=seed) for seed in (1, 1, 2)]
    keys, same_keys, other_keys = (text.context(100)[0] for text in texts)
    assert torch.equal(keys, same_keys)
    assert not torch.equal(keys, other_keys)
    assert keys.shape == (1, 2, 100, 16)
    assert keys.dtype == torch.bfloat16
    for one, two in zip(steps_of(texts[0], 2), steps_of(texts[1], 2), strict=True):
        assert one.shape == (1, 8, 1, 16)
        assert torch.equal(one, two)


def test_synthetic_keys_cluster_and_queries_drift() -> None:
    text = SyntheticText(GEOMETRY, region_tokens=50, spread=0.1)
    keys = text.context(100)[0].float()[0, 0]
    within = (keys[:50] - keys[:50].mean(0)).norm(dim=1).mean()
    between = (keys[:50].mean(0) - keys[50:].mean(0)).norm()
    assert within < between / 2
    before, after = (token[0].query.float().flatten() for token in (text.step(), text.step()))
    assert torch.cosine_similarity(before, after, dim=0) > 0.6
