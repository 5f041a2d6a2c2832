"""The ways transformers drives a cache: chunks, turns, beams, samples, drafts, compiled calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from dense_engine import DenseEngine, attach_dense
from tiny_models import (
    gemma3,
    left_padded,
    llama,
    own_cache,
    phi3_with_longrope,
    qwen3_with_some_sliding_layers,
    random_ids,
)

from tierstore.adapters.transformers import TierCache, attach_engine, geometry_of
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tiny_models import LanguageModel

MakeModel = Callable[[], "LanguageModel"]


@pytest.fixture(params=[llama, gemma3, qwen3_with_some_sliding_layers])
def make_model(request: pytest.FixtureRequest) -> MakeModel:
    make: MakeModel = request.param
    return make


@pytest.fixture
def model(make_model: MakeModel) -> LanguageModel:
    return make_model()


@pytest.fixture
def twin(make_model: MakeModel) -> LanguageModel:
    """The same model, left alone."""
    return make_model()


@pytest.fixture
def engine(model: LanguageModel) -> DenseEngine:
    return DenseEngine(geometry_of(model))


@pytest.fixture
def cache(model: LanguageModel, engine: DenseEngine) -> Iterator[TierCache]:
    with torch.no_grad(), attach_engine(model, engine) as cache:
        yield cache


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 4},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 20},
        {"repetition_penalty": 1.3},
    ],
    ids=["chunks", "beams", "several beams", "samples", "processors"],
)
def test_generation_modes_equal_those_of_the_model_alone(
    model: LanguageModel, options: dict[str, object]
) -> None:
    inputs = left_padded(13, 9)
    torch.manual_seed(3)
    alone = model.generate(**inputs, **own_cache(model), **options, max_new_tokens=8)
    torch.manual_seed(3)
    with attach_dense(model) as cache:
        found = model.generate(**inputs, **cache.kwargs, **options, max_new_tokens=8)
    assert torch.equal(found, alone)


@pytest.mark.parametrize("draft", ["assistant", "prompt lookup"])
def test_assisted_decoding_equals_greedy_decoding(model: LanguageModel, draft: str) -> None:
    ids = random_ids(1, 6).repeat(1, 3)
    assistant = llama(num_hidden_layers=1)
    options = (
        {"assistant_model": assistant} if draft == "assistant" else {"prompt_lookup_num_tokens": 3}
    )
    alone = model.generate(ids, **own_cache(model), max_new_tokens=16)
    engine = DenseEngine(geometry_of(model))
    with attach_engine(model, engine) as cache:
        found = model.generate(ids, **cache.kwargs, **options, max_new_tokens=16)
    assert torch.equal(found, alone)
    assert any(1 < tokens < 18 for _, tokens in engine.steps)


def test_a_second_turn_continues_the_same_text(
    model: LanguageModel, twin: LanguageModel, cache: TierCache
) -> None:
    own = own_cache(twin)
    text = random_ids(1, 9)
    for turn in range(3):
        options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 7}
        alone = twin.generate(text, **own, **options)
        assert torch.equal(model.generate(text, **cache.kwargs, **options), alone)
        text = torch.cat([alone, random_ids(1, 12, seed=turn)], dim=1)


def test_a_second_turn_of_a_padded_batch(
    model: LanguageModel, twin: LanguageModel, cache: TierCache
) -> None:
    own = own_cache(twin)
    inputs = left_padded(5, 9)
    first = twin.generate(**inputs, **own, max_new_tokens=4)
    assert torch.equal(model.generate(**inputs, **cache.kwargs, max_new_tokens=4), first)
    turn = left_padded(3, 6)
    text = torch.cat([first, turn["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4), turn["attention_mask"]], dim=1)
    alone = twin.generate(text, attention_mask=mask, **own, max_new_tokens=4)
    found = model.generate(text, attention_mask=mask, **cache.kwargs, max_new_tokens=4)
    assert torch.equal(found, alone)


def test_a_loop_over_the_model_equals_generate(
    model: LanguageModel, twin: LanguageModel, cache: TierCache
) -> None:
    ids = random_ids(2, 10)
    alone = twin.generate(ids, **own_cache(twin), max_new_tokens=6)
    text, new = ids, ids
    for _ in range(6):
        new = model(new, **cache.kwargs).logits[:, -1:].argmax(dim=-1)
        text = torch.cat([text, new], dim=1)
    assert torch.equal(text, alone)


def test_generating_again_after_a_reset_gives_the_same_text(
    model: LanguageModel, cache: TierCache
) -> None:
    first = model.generate(**left_padded(5, 9), **cache.kwargs, max_new_tokens=12)
    cache.reset()
    model.generate(random_ids(1, 30), **cache.kwargs, max_new_tokens=2)
    cache.reset()
    assert torch.equal(
        model.generate(**left_padded(5, 9), **cache.kwargs, max_new_tokens=12), first
    )


@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_text_that_is_stored_already_is_refused(
    model: LanguageModel, cache: TierCache, length: int
) -> None:
    """Transformers would append the whole prompt, or a tail of it, to itself and go on."""
    text = random_ids(1, 12)
    model(text, **cache.kwargs)
    with pytest.raises(ConfigError, match="already holds 12 tokens"):
        model.generate(text[:, :length], **cache.kwargs, max_new_tokens=2)


def test_a_padded_text_that_is_stored_already_is_refused(
    model: LanguageModel, cache: TierCache
) -> None:
    model(**left_padded(4, 8), **cache.kwargs)
    with pytest.raises(ConfigError, match="already holds 8 tokens"):
        model.generate(**left_padded(4, 8), **cache.kwargs, max_new_tokens=2)


def test_a_stored_text_generates_again_after_cropping_one_token() -> None:
    model = llama()
    text = random_ids(1, 12)
    with torch.no_grad(), attach_dense(model) as cache:
        model(text, **cache.kwargs)
        cache.crop(-1)
        found = model.generate(text, **cache.kwargs, max_new_tokens=6)
    assert torch.equal(found, model.generate(text, max_new_tokens=6))


def test_another_number_of_rows_is_refused(model: LanguageModel, cache: TierCache) -> None:
    model(random_ids(1, 5), **cache.kwargs)
    with pytest.raises(ConfigError, match="the call has 3 rows, the cache holds 1"):
        model(random_ids(3, 1), **cache.kwargs)


def test_rows_are_reordered_selected_and_repeated(
    model: LanguageModel, twin: LanguageModel, cache: TierCache
) -> None:
    own = own_cache(twin)
    (theirs,) = own.values()
    inputs = left_padded(9, 5, 11)
    mask = inputs["attention_mask"]
    twin(**inputs, **own)
    model(**inputs, **cache.kwargs)
    for method, argument, rows in [
        ("reorder_cache", torch.LongTensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
        ("batch_select_indices", torch.tensor([3, 1]), [3, 1]),
    ]:
        getattr(theirs, method)(argument)
        getattr(cache, method)(argument)
        mask = torch.cat([mask[rows], torch.ones(len(rows), 1)], dim=1)
        new = random_ids(len(rows), 1)
        alone = twin(new, attention_mask=mask, **own).logits
        found = model(new, attention_mask=mask, **cache.kwargs).logits
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def test_rows_of_an_empty_cache_are_left_alone(
    model: LanguageModel, engine: DenseEngine, cache: TierCache
) -> None:
    cache.reorder_cache(torch.LongTensor([1, 0]))
    cache.batch_repeat_interleave(3)
    model(random_ids(2, 5), **cache.kwargs)
    assert engine.tokens == [5, 5]


def test_cropped_tokens_are_forgotten() -> None:
    model = llama()
    inputs = left_padded(6, 9)
    more = torch.cat([inputs["attention_mask"], torch.ones(2, 4)], dim=1)
    with torch.no_grad(), attach_dense(model) as cache:
        model(**inputs, **cache.kwargs)
        expected = model(random_ids(2, 4), attention_mask=more, **cache.kwargs).logits
        cache.crop(-4)
        assert cache.get_seq_length() == 9
        found = model(random_ids(2, 4), attention_mask=more, **cache.kwargs).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [2, -10, -4])
def test_cropping_what_rows_do_not_share_is_refused(tokens: int) -> None:
    model = llama()
    mask = torch.ones(2, 9)
    mask[0, 6] = 0
    with torch.no_grad(), attach_dense(model) as cache:
        model(random_ids(2, 9), attention_mask=mask, **cache.kwargs)
        with pytest.raises(ConfigError, match=rf"crop\({tokens}\): expected minus a number"):
            cache.crop(tokens)


def test_a_compiled_model_attends_through_the_engine() -> None:
    model = gemma3()
    ids = random_ids(1, 10)
    alone = model.generate(ids, **own_cache(model), max_new_tokens=4)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), attach_dense(model) as cache:
        new = ids
        for token in alone[0, 10:]:
            new = compiled(new, **cache.kwargs).logits[:, -1:].argmax(dim=-1)
            assert new.item() == token
        assert not cache.is_compileable
    torch.compiler.reset()


def test_longrope_text_that_crosses_its_switch_in_generate_is_refused() -> None:
    """Transformers drops the given cache there and goes on with one of its own."""
    model = phi3_with_longrope(switch=16)
    with attach_dense(model) as cache, pytest.raises(ConfigError, match="embeddings=16") as refusal:
        model.generate(random_ids(1, 14), **cache.kwargs, max_new_tokens=8)
    assert "drops the cache" in str(refusal.value)


def test_longrope_prompt_beyond_its_switch_is_refused_by_generate() -> None:
    model = phi3_with_longrope(switch=16)
    with attach_dense(model) as cache, pytest.raises(ConfigError, match="drops the cache"):
        model.generate(random_ids(1, 30), **cache.kwargs, max_new_tokens=2)


def test_longrope_text_that_crosses_its_switch_in_a_loop_is_refused() -> None:
    model = phi3_with_longrope(switch=16)
    with torch.no_grad(), attach_dense(model) as cache:
        model(random_ids(1, 16), **cache.kwargs)
        with pytest.raises(ConfigError, match="beyond 16 LongRoPE rotates every key"):
            model(random_ids(1, 1), **cache.kwargs)


def test_longrope_text_that_is_cropped_across_its_switch_is_refused() -> None:
    model = phi3_with_longrope(switch=16)
    with torch.no_grad(), attach_dense(model) as cache:
        model(random_ids(1, 20), **cache.kwargs)
        cache.crop(-3)
        with pytest.raises(ConfigError, match="goes from 17 to 10 tokens, and beyond 16"):
            cache.crop(-7)
        model(random_ids(1, 1), **cache.kwargs)
        cache.crop(-18)
        model(random_ids(1, 5), **cache.kwargs)


def test_longrope_prompt_computed_in_one_call_generates() -> None:
    """The way out that the refusal names."""
    model = phi3_with_longrope(switch=16)
    text = random_ids(1, 30)
    with torch.no_grad(), attach_dense(model) as cache:
        model(text[:, :-1], **cache.kwargs)
        found = model.generate(text, **cache.kwargs, max_new_tokens=6)
    assert torch.equal(found, model.generate(text, use_cache=False, max_new_tokens=6))
