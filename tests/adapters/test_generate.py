"""Timed greedy generation, and the comparison with full attention."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import gemma3, llama, own_cache, random_ids
from transformers import DynamicCache

from tierstore.adapters.generate import (
    Generation,
    Observer,
    TierOptions,
    compare,
    end_tokens,
    generate,
)
from tierstore.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiny_models import LanguageModel

PROMPT: list[int] = random_ids(1, 200)[0].tolist()
EVERYTHING = TierOptions(budget=1.0, dram="8MiB")
# This preset attends to what it selects and nothing else, whatever happens to be resident.
LITTLE = TierOptions(preset="exact", budget=8, dram="8MiB")


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int]] = []
        self.advances: list[int] = []
        self.tokens: list[int] = []

    def start(self, task: str, total: int) -> None:
        self.tasks.append((task, total))
        self.advances.append(0)

    def advance(self) -> None:
        self.advances[-1] += 1

    def answer(self, token: int) -> None:
        self.tokens.append(token)


@pytest.fixture
def model() -> LanguageModel:
    return llama()


def greedy(model: LanguageModel, tokens: int) -> list[int]:
    """What transformers' own generate makes of the prompt with full attention."""
    ids = torch.tensor([PROMPT])
    text = model.generate(ids, **own_cache(model), max_new_tokens=tokens, do_sample=False)
    assert isinstance(text, torch.Tensor)
    new: list[int] = text[0, len(PROMPT) :].tolist()
    return new


@torch.no_grad()
def forced_logits(
    model: LanguageModel, cache: dict[str, object], tokens: tuple[int, ...]
) -> torch.Tensor:
    """Float64 logits [tokens - 1, vocabulary] after each token but the last, one step each."""
    model(torch.tensor([PROMPT]), **cache)
    steps = [model(torch.tensor([[token]]), **cache).logits[0, -1] for token in tokens[:-1]]
    return torch.stack(steps).double()


@pytest.mark.parametrize("make_model", [llama, gemma3])
def test_with_the_whole_budget_it_generates_what_transformers_does(
    make_model: Callable[[], LanguageModel],
) -> None:
    model = make_model()
    result = generate(model, PROMPT, 40, EVERYTHING)
    assert list(result.generation.tokens) == greedy(model, 40)
    assert result.generation.prompt_tokens == len(PROMPT)
    assert result.report.context_tokens == len(PROMPT) + 39
    assert result.comparison is None


def test_the_model_is_as_before_afterwards(model: LanguageModel) -> None:
    before = model.config._attn_implementation
    compare(model, PROMPT, 2, EVERYTHING)
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("as_list", [False, True])
def test_it_stops_behind_the_token_that_ends_a_text(model: LanguageModel, as_list: bool) -> None:
    end = greedy(model, 10)[5]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [127, end] if as_list else end
    result = generate(model, PROMPT, 10, EVERYTHING)
    assert result.generation.tokens[-1] == end
    assert end not in result.generation.tokens[:-1]
    assert end in end_tokens(model)


def test_a_comparison_goes_on_beyond_the_end_of_the_text(model: LanguageModel) -> None:
    expected = greedy(model, 10)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = expected[2]
    result = compare(model, PROMPT, 10, EVERYTHING)
    assert result.comparison is not None
    assert list(result.generation.tokens) == list(result.comparison.full.tokens) == expected


def test_with_the_whole_budget_the_comparison_finds_no_difference(model: LanguageModel) -> None:
    result = compare(model, PROMPT, 30, EVERYTHING)
    comparison = result.comparison
    assert comparison is not None
    assert comparison.first_difference is None
    assert len(comparison.kl) == 29
    assert max(comparison.kl) < 1e-6
    geometry = model.config
    kv_bytes = (len(PROMPT) + 29) * geometry.num_hidden_layers * 2 * 2 * 16 * 4
    assert comparison.full_kv_bytes == kv_bytes


def test_divergence_is_that_of_a_run_fed_with_full_attentions_tokens(model: LanguageModel) -> None:
    """The oracle feeds all tokens to a new cache; the code sets the run back to the difference."""
    result = compare(model, PROMPT, 24, LITTLE)
    comparison = result.comparison
    assert comparison is not None
    full, ours = comparison.full.tokens, result.generation.tokens
    difference = comparison.first_difference
    assert difference is not None
    assert 0 < difference < 22
    assert full[:difference] == ours[:difference]
    assert full[difference] != ours[difference]
    expected = forced_logits(model, dict(own_cache(model)), full).softmax(-1)
    with LITTLE.attach(model) as cache:
        found = forced_logits(model, dict(cache.kwargs), full).softmax(-1)
    kl = (expected * (expected / found).log()).sum(-1)
    assert comparison.kl == pytest.approx(kl.tolist(), rel=1e-3, abs=1e-6)
    assert comparison.mean_kl == pytest.approx(kl.mean().item(), rel=1e-3)


def test_the_report_is_about_the_free_run_only(model: LanguageModel) -> None:
    compared, alone = compare(model, PROMPT, 24, LITTLE), generate(model, PROMPT, 24, LITTLE)
    assert compared.generation.tokens == alone.generation.tokens
    assert compared.report == alone.report


def test_one_new_token_has_nothing_to_decode(model: LanguageModel) -> None:
    result = compare(model, PROMPT, 1, EVERYTHING)
    generation, comparison = result.generation, result.comparison
    assert generation.first_step_seconds is None
    assert generation.decode_rate is None
    assert generation.median_step_seconds is None
    assert comparison is not None
    assert comparison.kl == ()
    assert comparison.mean_kl is None


def test_rates_leave_the_first_step_out() -> None:
    generation = Generation(100, (1, 2, 3, 4, 5), 4.0, (9.0, 0.1, 0.3, 0.1))
    assert generation.prefill_rate == 25
    assert generation.first_step_seconds == 9
    assert generation.decode_rate == pytest.approx(6)
    assert generation.median_step_seconds == pytest.approx(0.1)


def test_the_observer_follows_a_generation(model: LanguageModel) -> None:
    notes = Notes()
    result = generate(model, PROMPT, 6, EVERYTHING, notes)
    assert notes.tasks == [("prefill", 3)]
    assert notes.advances == [3]
    assert tuple(notes.tokens) == result.generation.tokens


def test_the_observer_follows_a_comparison(model: LanguageModel) -> None:
    notes = Notes()
    result = compare(model, PROMPT, 24, LITTLE, notes)
    assert result.comparison is not None
    assert result.comparison.first_difference is not None
    assert notes.tasks == [
        ("full attention: prefill", 3),
        ("full attention: decode", 24),
        ("prefill", 3),
        ("comparing distributions", 23 - result.comparison.first_difference),
    ]
    assert notes.advances == [total for _, total in notes.tasks]
    assert tuple(notes.tokens) == result.generation.tokens


def test_full_attentions_cache_is_gone_before_the_tiers_are_filled(model: LanguageModel) -> None:
    class Watch(Observer):
        found = -1

        def start(self, task: str, total: int) -> None:
            if task == "prefill":
                # isinstance would make torch warn about objects of its own.
                caches = [thing for thing in gc.get_objects() if type(thing) is DynamicCache]
                self.found = sum(cache.get_seq_length() > 0 for cache in caches)

    gc.collect()
    watch = Watch()
    compare(model, PROMPT, 2, EVERYTHING, watch)
    assert watch.found == 0


def test_the_context_window_holds_prompt_and_new_tokens() -> None:
    model = llama(max_position_embeddings=len(PROMPT) + 4)
    assert len(generate(model, PROMPT, 4, EVERYTHING).generation.tokens) == 4
    with pytest.raises(ConfigError, match="at most 204 together, the model's context window"):
        generate(model, PROMPT, 5, EVERYTHING)


def test_no_new_tokens_are_refused(model: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=0: expected at least 1"):
        generate(model, PROMPT, 0, EVERYTHING)


def test_nothing_is_left_on_disk(model: LanguageModel, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    compare(model, PROMPT, 2, TierOptions(dram="8MiB", disk=disk))
    with pytest.raises(CapacityError):
        generate(model, PROMPT, 2, TierOptions(fast="4KiB", dram="8MiB", disk=disk))
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_keeps_the_files_of_one_run(model: LanguageModel, tmp_path: Path) -> None:
    compare(model, PROMPT, 2, TierOptions(dram="8MiB", disk=tmp_path, keep=True))
    (kept,) = tmp_path.iterdir()
    assert (kept / "blocks").stat().st_size > 0
