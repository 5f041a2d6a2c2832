"""Requests that join and leave a model's batch get what they get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import gemma3, llama, phi3_with_longrope, qwen3, random_ids

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.generate import TierOptions, generate
from tierstore.adapters.presets import PRESETS
from tierstore.adapters.transformers import ContinuousBatch, attach, geometry_of
from tierstore.errors import CapacityError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_models import LanguageModel

LENGTHS = (150, 9, 230, 60, 1, 100, 31, 180)
NEW = (30, 45, 12, 33, 40, 1, 25, 20)
DRAM: dict[str, Any] = {"dram": "8MiB"}


@pytest.fixture(params=[llama, qwen3])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    make: Callable[[], LanguageModel] = request.param
    return make()


def prompt(number: int) -> list[int]:
    ids: list[int] = random_ids(1, LENGTHS[number], seed=number)[0].tolist()
    return ids


def batch_of(model: LanguageModel, options: dict[str, Any] = DRAM) -> ContinuousBatch:
    return ContinuousBatch(model, SparseAttention(geometry_of(model), **options))


def alone(model: LanguageModel, number: int, options: dict[str, Any] = DRAM) -> list[int]:
    """What `attach` makes of a request."""
    found = generate(model, prompt(number), NEW[number], TierOptions(**options))
    return list(found.generation.tokens)


GUESSING = replace(PRESETS["exact"], name="guessing", schedule="previous-layer")


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "exact", "budget": 0.2},
        {"preset": "kvdrive", "budget": 16},
        {"preset": GUESSING, "budget": 0.2, "fast": "2MiB"},
    ],
    ids=["exact", "kvdrive", "previous-layer"],
)
def test_eight_requests_that_come_and_go_get_what_they_get_alone(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    options = options | DRAM
    made: dict[int, list[int]] = {}
    with batch_of(model, options) as batch:
        waiting = list(range(8))
        turn = 0
        while waiting or batch.running:
            if waiting and turn % 4 == 0:
                number = waiting.pop(0)
                assert batch.add(prompt(number), max_new_tokens=NEW[number]) == number
                made[number] = []
            for number, token in batch.step().items():
                made[number].append(token)
            turn += 1
        for number in range(8):
            tokens, reason, error = batch.finish(number)
            assert (list(tokens), reason, error) == (made[number], "length", None)
    for number in range(8):
        assert made[number] == alone(model, number, options)


def test_a_request_ends_at_a_stop_token_and_may_be_taken_out() -> None:
    model = llama()
    free = alone(model, 0)
    with batch_of(model) as batch:
        stop = free[6]
        stopped = batch.add(prompt(0), max_new_tokens=30, stop={stop})
        taken = batch.add(prompt(1), max_new_tokens=30)
        for _ in range(3):
            batch.step()
        assert batch.finish(taken).reason == "left"
        with pytest.raises(ConfigError, match=f"request {taken}: expected one of"):
            batch.finish(taken)
        list(batch)
        tokens, reason, _ = batch.finish(stopped)
        assert reason == "stop"
        assert list(tokens) == free[: free.index(stop) + 1]
        assert batch.step() == {}


def test_sampling_is_the_callers() -> None:
    model = llama()
    with batch_of(model) as batch:
        rank_two = batch.add(
            prompt(0), max_new_tokens=8, choose=lambda logits: int(logits.topk(2).indices[1])
        )
        greedy = batch.add(prompt(1), max_new_tokens=8)

        def broken(logits: torch.Tensor) -> int:
            raise LookupError(f"of {len(logits)}")

        with pytest.raises(LookupError, match="of 128"):
            batch.add(prompt(2), max_new_tokens=8, choose=broken)
        list(batch)
        own, other = batch.finish(greedy), batch.finish(rank_two)
    assert list(own.tokens) == alone(model, 1)[:8]
    assert len(other.tokens) == 8
    assert other.tokens[0] != alone(model, 0)[0]


def fill(batch: ContinuousBatch) -> None:
    """Requests without end."""
    while True:
        batch.add(prompt(2), max_new_tokens=200)


def test_what_does_not_fit_is_refused_and_the_others_go_on() -> None:
    model = llama()
    with batch_of(model, {"preset": "exact", "dram": "600KiB"}) as batch:
        batch.add(prompt(0), max_new_tokens=30)
        batch.step()
        with pytest.raises(CapacityError, match="with one more sequence"):
            fill(batch)
        assert batch.running
        list(batch)
        tokens = batch.finish(0).tokens
    assert list(tokens) == alone(model, 0, {"preset": "exact", "dram": "8MiB"})


@pytest.mark.parametrize("options", [{}, {"preset": GUESSING, "fast": "2MiB"}], ids=len)
def test_a_request_whose_keys_break_leaves_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Its embedding is NaN from one token on, as a broken adapter might make it."""
    model, options = llama(), options | DRAM
    expected = {number: alone(model, number, options) for number in (0, 3)}
    with batch_of(model, options) as batch:
        for number in (0, 3, 1):
            batch.add(prompt(number), max_new_tokens=NEW[number])
        for _ in range(5):
            batch.step()
        real = model.model.embed_tokens.forward

        def spoilt(ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = real(ids).clone()
            out[2] = torch.nan
            return out

        monkeypatch.setattr(model.model.embed_tokens, "forward", spoilt)
        batch.step()
        monkeypatch.undo()
        assert batch.running == [0, 1]
        list(batch)
        tokens, reason, error = batch.finish(2)
        assert (len(tokens), reason) == (6, "error")
        assert "not finite" in str(error)
        assert list(batch.finish(0).tokens) == expected[0]
        assert list(batch.finish(1).tokens) == expected[3]


def test_a_model_that_fails_ends_those_it_computed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    with batch_of(model) as batch:
        first = batch.add(prompt(0), max_new_tokens=30)
        batch.step()
        layer = model.model.layers[1]

        def fail(*arguments: object, **named: object) -> None:
            raise RuntimeError("no more memory")

        monkeypatch.setattr(layer.mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            batch.add(prompt(1), max_new_tokens=5)
        monkeypatch.undo()
        assert batch.running == [first]
        batch.step()
        monkeypatch.setattr(layer.mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            batch.step()
        monkeypatch.undo()
        assert batch.running == []
        assert isinstance(batch.finish(first).error, RuntimeError)
        again = batch.add(prompt(0), max_new_tokens=30)
        list(batch)
        tokens = batch.finish(again).tokens
    assert list(tokens) == alone(model, 0)


def test_the_model_is_the_batchs_until_it_is_closed() -> None:
    model = llama()
    ids = random_ids(1, 20)
    with torch.no_grad():
        before = model(ids).logits
        with batch_of(model) as batch:
            with pytest.raises(ConfigError, match="called with no cache"):
                model(ids)
            with pytest.raises(ConfigError, match="use its add"):
                model(ids, **batch._cache.kwargs)
            with pytest.raises(ConfigError, match="is attached already"):
                attach(model, dram="8MiB")
        torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([], "expected at least one token"),
        ([3, 128], "ids below 128"),
        ([-1], r"tokens\[0\]=-1"),
        ([5] * 500, "the model's context window"),
    ],
)
def test_a_bad_prompt_is_refused(ids: list[int], sentence: str) -> None:
    model = llama()
    with batch_of(model) as batch:
        with pytest.raises(ConfigError, match=sentence):
            batch.add(ids, max_new_tokens=30)
        assert batch.running == []


def test_models_whose_rows_cannot_be_kept_apart_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="slide over a window"):
        batch_of(gemma3())
    model = phi3_with_longrope(switch=64)
    with batch_of(model) as batch:
        with pytest.raises(UnsupportedModelError, match="expected at most 64"):
            batch.add(prompt(3), max_new_tokens=10)
        batch.add(prompt(6), max_new_tokens=10)
        list(batch)
