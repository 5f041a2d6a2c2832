"""Every supported architecture generates through the adapter what it generates by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from dense_engine import DenseEngine, attach_dense
from tiny_models import (
    ARCHITECTURES,
    gemma3,
    left_padded,
    llama,
    own_cache,
    phi3,
    random_ids,
)
from torch import nn

from tierstore.adapters.transformers import attach_engine, geometry_of
from tierstore.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_models import LanguageModel

GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("make_model", ARCHITECTURES)
def test_greedy_generation_equals_that_of_the_model_alone(
    make_model: Callable[[], LanguageModel],
) -> None:
    model = make_model()
    inputs = left_padded(21, 9, 14)
    alone = model.generate(**inputs, **own_cache(model), **GREEDY, max_new_tokens=24)
    with attach_dense(model) as cache:
        found = model.generate(**inputs, **cache.kwargs, **GREEDY, max_new_tokens=24)
    assert torch.equal(found.sequences, alone.sequences)
    torch.testing.assert_close(found.logits, alone.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make_model", ARCHITECTURES)
def test_each_full_attention_layer_reaches_the_engine_once_per_pass(
    make_model: Callable[[], LanguageModel],
) -> None:
    model = make_model()
    engine = DenseEngine(geometry_of(model))
    with attach_engine(model, engine) as cache:
        model.generate(random_ids(1, 7), **cache.kwargs, max_new_tokens=3)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = range(kinds.count("full_attention"))
    assert engine.steps == [(layer, tokens) for tokens in (7, 1, 1) for layer in layers]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_reaches_the_engine_unchanged(dtype: torch.dtype) -> None:
    model = llama()
    nn.Module.to(model, dtype)
    geometry = geometry_of(model)
    with torch.no_grad(), attach_engine(model, DenseEngine(geometry)) as cache:
        logits = model(random_ids(2, 9), **cache.kwargs).logits
    assert (geometry.dtype, logits.dtype) == (dtype, dtype)


def test_attention_scale_of_the_model_is_used() -> None:
    model = gemma3(query_pre_attn_scalar=3)
    ids = random_ids(1, 12)
    alone = model.generate(ids, **own_cache(model), **GREEDY, max_new_tokens=8)
    with attach_dense(model) as cache:
        found = model.generate(ids, **cache.kwargs, **GREEDY, max_new_tokens=8)
    torch.testing.assert_close(found.logits, alone.logits, rtol=1e-4, atol=1e-4)


def test_a_window_longer_than_any_text_is_full_attention() -> None:
    """Phi-3-mini-128k says sliding_window=262144, which never cuts anything off."""
    model = phi3(sliding_window=600)
    inputs = left_padded(21, 9)
    alone = model.generate(**inputs, **own_cache(model), **GREEDY, max_new_tokens=8)
    engine = DenseEngine(geometry_of(model))
    with attach_engine(model, engine) as cache:
        found = model.generate(**inputs, **cache.kwargs, **GREEDY, max_new_tokens=8)
        assert engine.tokens == [28, 16]
    torch.testing.assert_close(found.logits, alone.logits, rtol=1e-4, atol=1e-4)


def test_a_text_beyond_such_a_window_is_refused() -> None:
    model = phi3(sliding_window=600)
    with torch.no_grad(), attach_dense(model) as cache:
        model(random_ids(1, 600), **cache.kwargs)
        with pytest.raises(UnsupportedModelError, match="601 tokens, beyond the sliding window"):
            model(random_ids(1, 1), **cache.kwargs)
