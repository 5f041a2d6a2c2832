"""Only text is stored: padding on the left, on the right and in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from dense_engine import DenseEngine, attach_dense
from tiny_models import (
    gemma3,
    gemma3_multimodal,
    left_padded,
    llama,
    own_cache,
    qwen3_with_some_sliding_layers,
    random_ids,
)

from tierstore.adapters.transformers import TierCache, attach_engine, geometry_of
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiny_models import LanguageModel

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]],
    "holes": [[1, 0, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0]],
}


@pytest.fixture
def model() -> LanguageModel:
    return llama()


@pytest.fixture
def engine(model: LanguageModel) -> DenseEngine:
    return DenseEngine(geometry_of(model))


@pytest.fixture
def cache(model: LanguageModel, engine: DenseEngine) -> Iterator[TierCache]:
    with torch.no_grad(), attach_engine(model, engine) as cache:
        yield cache


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("make_model", [llama, gemma3, qwen3_with_some_sliding_layers])
@torch.no_grad()
def test_logits_of_text_equal_those_of_the_model_alone(
    make_model: Callable[[], LanguageModel], name: str
) -> None:
    model = make_model()
    mask = torch.tensor(MASKS[name])
    more = torch.tensor([[1, 1, 0], [1, 0, 1]])
    both = torch.cat([mask, more], dim=1)
    ids, next_ids = random_ids(2, 8), random_ids(2, 3, seed=2)
    own = own_cache(model)
    alone = model(ids, attention_mask=mask, **own).logits
    next_alone = model(next_ids, attention_mask=both, **own).logits
    engine = DenseEngine(geometry_of(model))
    with attach_engine(model, engine) as cache:
        found = model(ids, attention_mask=mask, **cache.kwargs).logits
        next_found = model(next_ids, attention_mask=both, **cache.kwargs).logits
    is_text, is_next_text = mask.bool(), more.bool()
    torch.testing.assert_close(found[is_text], alone[is_text], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        next_found[is_next_text], next_alone[is_next_text], rtol=1e-4, atol=1e-4
    )
    assert engine.tokens == both.sum(dim=1).tolist()


def test_a_mask_without_padding_is_the_same_as_none(model: LanguageModel, cache: TierCache) -> None:
    first = model(random_ids(2, 5), attention_mask=torch.ones(2, 5), **cache.kwargs).logits
    second = model(random_ids(2, 1), **cache.kwargs).logits
    cache.reset()
    assert torch.equal(first, model(random_ids(2, 5), **cache.kwargs).logits)
    assert torch.equal(second, model(random_ids(2, 1), **cache.kwargs).logits)


@pytest.mark.parametrize(
    "changed",
    [None, torch.ones(2, 9), torch.tensor([[0, 1] + [1] * 7, [1] * 9])],
    ids=["missing", "without padding", "other padding"],
)
def test_a_mask_that_contradicts_what_is_stored_is_refused(
    model: LanguageModel, cache: TierCache, changed: torch.Tensor | None
) -> None:
    model(**left_padded(6, 8), **cache.kwargs)
    with pytest.raises(ConfigError, match="pass the attention_mask of the earlier calls"):
        model(random_ids(2, 1), attention_mask=changed, **cache.kwargs)


def test_padding_that_appears_in_stored_text_is_refused(
    model: LanguageModel, cache: TierCache
) -> None:
    model(random_ids(2, 8), **cache.kwargs)
    mask = torch.ones(2, 9)
    mask[0, 3] = 0
    with pytest.raises(ConfigError, match="other padding"):
        model(random_ids(2, 1), attention_mask=mask, **cache.kwargs)


def test_a_mask_of_the_new_tokens_alone_is_refused(model: LanguageModel, cache: TierCache) -> None:
    model(random_ids(2, 4), **cache.kwargs)
    with pytest.raises(ConfigError, match=r"shape \(2, 6\): expected \(2, 10\)"):
        model(random_ids(2, 6), attention_mask=torch.ones(2, 6), **cache.kwargs)


def test_a_refused_call_leaves_the_cache_as_it_was(
    model: LanguageModel, engine: DenseEngine, cache: TierCache
) -> None:
    model(random_ids(2, 8), **cache.kwargs)
    with pytest.raises(ConfigError):
        model(random_ids(2, 1), attention_mask=torch.zeros(2, 9), **cache.kwargs)
    model(random_ids(2, 1), **cache.kwargs)
    assert engine.tokens == [9, 9]


@torch.no_grad()
def test_masks_for_images_are_refused() -> None:
    """Whoever passes token types wants tokens of an image to see each other."""
    model = gemma3_multimodal()
    ids = random_ids(1, 5)
    with (
        attach_dense(model) as cache,
        pytest.raises(ConfigError, match="cannot apply custom masks"),
    ):
        model(ids, token_type_ids=torch.ones_like(ids), **cache.kwargs)


@pytest.mark.parametrize("make_model", [llama, gemma3])
@torch.no_grad()
def test_custom_masks_are_refused(make_model: Callable[[], LanguageModel]) -> None:
    model = make_model()
    with (
        attach_dense(model) as cache,
        pytest.raises(ConfigError, match=r"shape \(1, 1, 5, 5\): expected a 2-D padding mask"),
    ):
        model(random_ids(1, 5), attention_mask=torch.zeros(1, 1, 5, 5), **cache.kwargs)
