"""Attaching, detaching, and every way to use a cache where it does not belong."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dense_engine import DenseEngine, attach_dense
from tiny_models import gemma3, llama, own_cache, random_ids, seeded
from torch import nn

from tierstore.adapters import transformers as adapter
from tierstore.adapters.transformers import TierCache, attach, attach_engine, geometry_of
from tierstore.errors import ConfigError, MissingExtraError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiny_models import LanguageModel
    from transformers import PreTrainedModel


@pytest.fixture
def model() -> LanguageModel:
    return llama()


@pytest.fixture
def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The part of the model that runs its layers."""
    decoder: PreTrainedModel = model.get_decoder()
    return decoder


@pytest.fixture
def engine(model: LanguageModel) -> DenseEngine:
    return DenseEngine(geometry_of(model))


@pytest.fixture
def cache(model: LanguageModel, engine: DenseEngine) -> Iterator[TierCache]:
    with torch.no_grad(), attach_engine(model, engine) as cache:
        yield cache


def test_geometry_is_read_from_the_configuration() -> None:
    geometry = geometry_of(gemma3(num_attention_heads=8, num_key_value_heads=2, head_dim=20))
    assert (geometry.layers, geometry.query_heads, geometry.kv_heads) == (2, 8, 2)
    assert (geometry.head_dim, geometry.value_size) == (20, 20)
    assert (geometry.dtype, geometry.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_gets_its_attention_back(
    model: LanguageModel, engine: DenseEngine, attention: str
) -> None:
    model.set_attn_implementation(attention)
    expected = model.generate(random_ids(1, 5), max_new_tokens=3)
    with attach_engine(model, engine):
        assert model.config._attn_implementation == "tierstore"
    assert model.config._attn_implementation == attention
    assert torch.equal(model.generate(random_ids(1, 5), max_new_tokens=3), expected)
    assert engine.is_closed


def test_the_model_gets_its_attention_back_after_an_error(
    model: LanguageModel, engine: DenseEngine
) -> None:
    with pytest.raises(KeyError), attach_engine(model, engine):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert engine.is_closed
    model.generate(random_ids(1, 5), max_new_tokens=2)


def test_a_cache_works_without_a_with_block(model: LanguageModel, engine: DenseEngine) -> None:
    cache = attach_engine(model, engine)
    model.generate(random_ids(1, 5), **cache.kwargs, max_new_tokens=2)
    cache.close()
    cache.close()
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_chosen_meanwhile_stands_after_closing(
    model: LanguageModel, engine: DenseEngine
) -> None:
    with attach_engine(model, engine):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_failing_engine_still_gives_the_model_back(
    model: LanguageModel, engine: DenseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("gone")

    monkeypatch.setattr(engine, "close", fail)
    with pytest.raises(OSError, match="gone"), attach_engine(model, engine):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_a_second_attach_is_refused_until_the_first_is_closed(
    model: LanguageModel, engine: DenseEngine
) -> None:
    second = DenseEngine(geometry_of(model))
    with attach_engine(model, engine) as cache:
        with pytest.raises(ConfigError, match="this LlamaForCausalLM is attached already"):
            attach_engine(model, second)
        assert not second.is_closed
        model.generate(random_ids(1, 5), **cache.kwargs, max_new_tokens=2)
    with attach_engine(model, second) as cache:
        model.generate(random_ids(1, 5), **cache.kwargs, max_new_tokens=2)


def test_attaching_the_decoder_of_an_attached_model_is_refused(
    model: LanguageModel, decoder: PreTrainedModel, cache: TierCache
) -> None:
    with pytest.raises(ConfigError, match="attached already"):
        attach_engine(decoder, DenseEngine(geometry_of(model)))


def test_a_decoder_alone_can_be_attached(
    model: LanguageModel, decoder: PreTrainedModel, engine: DenseEngine
) -> None:
    own = own_cache(model)
    ids = random_ids(2, 6)
    with torch.no_grad(), attach_engine(decoder, engine) as cache:
        found = decoder(ids, **cache.kwargs).last_hidden_state
    torch.testing.assert_close(found, decoder(ids, **own).last_hidden_state)


def test_arguments_by_position_are_understood(
    decoder: PreTrainedModel, engine: DenseEngine, cache: TierCache
) -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    decoder(random_ids(2, 4), mask, None, *cache.kwargs.values())
    assert engine.tokens == [3, 4]


def test_embeddings_instead_of_tokens_are_understood(
    model: LanguageModel, engine: DenseEngine, cache: TierCache
) -> None:
    embeddings = model.get_input_embeddings()(random_ids(2, 6))
    model(inputs_embeds=embeddings, **cache.kwargs)
    assert engine.tokens == [6, 6]


@pytest.mark.parametrize("given", ["no cache", "another cache"])
def test_a_call_without_the_cache_is_refused(
    model: LanguageModel, cache: TierCache, given: str
) -> None:
    own = own_cache(model) if given == "another cache" else {"use_cache": False}
    with pytest.raises(ConfigError, match=f"was called with {given}"):
        model(random_ids(1, 4), **own)


def test_generate_without_the_cache_is_refused(model: LanguageModel, cache: TierCache) -> None:
    with pytest.raises(ConfigError, match=r"was called with another cache \(DynamicCache\)"):
        model.generate(random_ids(1, 4), max_new_tokens=2)


@pytest.mark.parametrize("is_attached", [False, True])
def test_the_cache_of_another_model_is_refused(cache: TierCache, is_attached: bool) -> None:
    other = llama(num_hidden_layers=4)
    if is_attached:
        attach_engine(other, DenseEngine(geometry_of(other)))
    expected = "another cache" if is_attached else "pass it only to the model it was made for"
    with pytest.raises(ConfigError, match=expected):
        other.generate(random_ids(1, 4), **cache.kwargs, max_new_tokens=2)


def test_a_closed_cache_is_refused(model: LanguageModel, engine: DenseEngine) -> None:
    with attach_engine(model, engine) as cache:
        model.generate(random_ids(1, 4), **cache.kwargs, max_new_tokens=2)
    with pytest.raises(ConfigError, match="the tierstore cache is closed"):
        model.generate(random_ids(1, 9), **cache.kwargs, max_new_tokens=2)
    for method, argument in [("crop", -1), ("reorder_cache", torch.LongTensor([0]))]:
        with pytest.raises(ConfigError, match="the tierstore cache is closed"):
            getattr(cache, method)(argument)
    with pytest.raises(ConfigError, match="the tierstore cache is closed"):
        cache.reset()


def test_switching_attention_while_attached_is_refused(
    model: LanguageModel, cache: TierCache
) -> None:
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="was switched to attention 'eager'"):
        model.generate(random_ids(1, 4), **cache.kwargs, max_new_tokens=2)


def test_training_mode_is_refused(model: LanguageModel, cache: TierCache) -> None:
    model.train()
    with pytest.raises(ConfigError, match="is in training mode"):
        model(random_ids(1, 4), **cache.kwargs)


def test_gradients_are_refused(model: LanguageModel, cache: TierCache) -> None:
    with torch.enable_grad(), pytest.raises(ConfigError, match="with gradients enabled"):
        model(random_ids(1, 4), **cache.kwargs)


def test_attention_weights_are_refused(model: LanguageModel, cache: TierCache) -> None:
    with pytest.raises(ConfigError, match="never forms attention weights"):
        model(random_ids(1, 4), **cache.kwargs, output_attentions=True)


def test_attention_weights_from_generate_are_refused(
    model: LanguageModel, cache: TierCache
) -> None:
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    with pytest.raises(ConfigError, match="never forms attention weights"):
        model.generate(random_ids(1, 4), **cache.kwargs, **options)


def test_generation_without_a_cache_is_refused(model: LanguageModel, cache: TierCache) -> None:
    with pytest.raises(ConfigError):
        model.generate(random_ids(1, 4), **cache.kwargs, use_cache=False, max_new_tokens=3)


def test_another_dtype_under_autocast_is_refused(model: LanguageModel, cache: TierCache) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedModelError, match="bfloat16"),
    ):
        model(random_ids(1, 4), **cache.kwargs)


def test_copying_a_cache_is_refused(cache: TierCache) -> None:
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(cache)


def test_after_a_failed_pass_only_a_reset_helps(
    model: LanguageModel, engine: DenseEngine, cache: TierCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(engine, "attend", fail)
    with pytest.raises(MemoryError):
        model(random_ids(1, 4), **cache.kwargs)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="an earlier forward pass failed"):
        model(random_ids(1, 4), **cache.kwargs)
    cache.reset()
    model(random_ids(1, 4), **cache.kwargs)
    assert engine.tokens == [4]


def test_layers_that_never_attend_are_noticed(model: LanguageModel, cache: TierCache) -> None:
    model.config.num_hidden_layers = 2
    with pytest.raises(UnsupportedModelError, match="2 layers attended through tierstore"):
        model(random_ids(1, 4), **cache.kwargs)


def test_layers_called_past_the_forward_pass_are_refused(
    decoder: PreTrainedModel, cache: TierCache
) -> None:
    with pytest.raises(ConfigError, match="was used outside its forward pass"):
        decoder.forward(random_ids(1, 4), **cache.kwargs)


def test_a_wrapped_model_is_refused(model: LanguageModel, engine: DenseEngine) -> None:
    with pytest.raises(ConfigError, match="model is a DataParallel: expected"):
        attach_engine(nn.DataParallel(model), engine)  # type: ignore[arg-type]


def test_an_engine_of_another_geometry_is_refused(model: LanguageModel) -> None:
    other = DenseEngine(geometry_of(llama(num_hidden_layers=5)))
    with pytest.raises(ConfigError, match=r"layers=5.*expected geometry_of\(model\).*layers=3"):
        attach_engine(model, other)
    assert model.config._attn_implementation == "sdpa"


def test_the_report_is_the_engine_s(model: LanguageModel, cache: TierCache) -> None:
    model(random_ids(1, 4), **cache.kwargs)
    assert cache.report().context_tokens == 4


@torch.no_grad()
def test_another_model_of_the_same_configuration_is_refused(model: LanguageModel) -> None:
    """Models that share a configuration object share the name of their attention."""
    other = seeded(type(model), model.config)
    with attach_dense(model), pytest.raises(ConfigError, match="keys that come from no tierstore"):
        other(random_ids(1, 4))


def test_attach_makes_the_engine_and_removes_its_files(
    model: LanguageModel, tmp_path: Path
) -> None:
    ids = random_ids(1, 200)
    alone = model.generate(ids, max_new_tokens=8)
    disk = tmp_path / "kv"
    with attach(model, budget=1.0, fast="1MiB", dram="1MiB", disk=disk) as cache:
        assert torch.equal(model.generate(ids, **cache.kwargs, max_new_tokens=8), alone)
        assert cache.report().context_tokens == 207
        assert any(disk.iterdir())
    assert not disk.exists() or not any(disk.iterdir())


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"preset": "none"}, {"dram": "much"}, {"window": 0}]
)
def test_wrong_options_leave_the_model_and_the_disk_alone(
    model: LanguageModel, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"dram": "1MiB", "disk": tmp_path / "kv"}
    with pytest.raises(ConfigError):
        attach(model, **options | wrong)
    assert model.config._attn_implementation == "sdpa"
    assert not any(tmp_path.iterdir())


def test_attaching_twice_leaves_no_files_of_the_second(
    model: LanguageModel, cache: TierCache, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="attached already"):
        attach(model, dram="1MiB", disk=tmp_path / "kv")
    assert not any(tmp_path.rglob("*blocks*"))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[transformers\]'"):
        importlib.reload(adapter)
