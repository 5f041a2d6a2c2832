"""The decode benchmark on a tiny model: what it measures and reports, not how fast it is."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
import torch
from bench_schema import as_json
from rich.console import Console

from tierstore.adapters.generate import next_logits, own_cache
from tierstore.benchmarks import decode
from tierstore.benchmarks.caches import CACHES
from tierstore.benchmarks.language import real_text, sharing_weights
from tierstore.benchmarks.steps import STEPS, time_steps
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel

TOKENS, ROUNDS = 1_500, 2


def test_measures_every_cache_in_the_same_rounds(tiny_model: LoadedModel, tmp_path: Path) -> None:
    said: list[str] = []
    findings = decode.measure(
        said.append, tiny_model, repeat=ROUNDS, tokens=TOKENS, disk=tmp_path / "kv"
    )
    data = as_json(findings)

    decoded = data["measures"]["decode"]["values"]
    assert list(decoded) == list(CACHES) == list(data["configurations"])
    assert {len(values) for values in decoded.values()} == {ROUNDS}
    assert set(data["measures"]) == {"decode", "decode mean", "page faults", "prefill"}
    assert {"dynamic", "kvdrive", "half"} == set(data["measures"]["prefill"]["values"])
    assert any(f"round {ROUNDS} of {ROUNDS}" in line for line in said)
    assert "Cap: " in data["notes"][0]

    tiers = data["details"]["tiers"]
    assert set(tiers) == {"full", "kvdrive", "half", "window", "quarter", "demo"}
    for report in tiers.values():
        assert report["context_tokens"] == TOKENS + STEPS * (ROUNDS + 1)
    assert [tier["name"] for tier in tiers["demo"]["tiers"]] == ["fast", "dram", "disk"]
    assert tiers["half"]["tiers"][1]["bytes_read"] > 0
    assert not list(tmp_path.iterdir())

    text = io.StringIO()
    findings.print(Console(file=text, width=110))
    for part in (data["machine"]["cpu"], "dynamic (baseline)", "at least 3.00", "Cap: "):
        assert part in text.getvalue()


def test_a_context_beyond_the_window_is_refused(tiny_model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model reads at most 4,096"):
        decode.measure(lambda _: None, tiny_model, repeat=1, tokens=4_090, disk=tmp_path)


def test_text_that_is_too_short_is_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="ask for fewer"):
        real_text(tiny_model.tokenizer, 10**8)


def test_models_that_share_weights_attach_on_their_own(tiny_model: LoadedModel) -> None:
    from tierstore.adapters.transformers import attach

    model = tiny_model.model
    other = sharing_weights(model)
    text = real_text(tiny_model.tokenizer, 40)
    with attach(model, dram="1MiB") as first, attach(other, dram="1MiB") as second:
        logits = [next_logits(model, text, first.kwargs), next_logits(other, text, second.kwargs)]
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(own.data_ptr() == shared.data_ptr() for own, shared in pairs)
    own = next_logits(model, text, own_cache(model))
    for found in logits:
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)


def test_steps_are_timed_one_by_one() -> None:
    seen: list[int] = []
    steps = time_steps(seen.append, [3, 1, 2])
    assert seen == [3, 1, 2]
    assert len(steps.seconds) == 3
    assert 0 < min(steps.seconds) <= steps.median_ms / 1e3 <= max(steps.seconds)
    assert steps.mean_ms == pytest.approx(1e3 * sum(steps.seconds) / 3)
