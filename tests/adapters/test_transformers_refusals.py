"""Models that cannot be served are refused when they are attached, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import gemma3, llama, mistral, phi3, seeded, shaped
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tierstore.adapters.transformers import geometry_of
from tierstore.adapters.transformers.attention import attention_forward
from tierstore.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

MOE = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
MLA = MOE | {
    "n_routed_experts": 2,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
SMALL_T5: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (DeepseekV2ForCausalLM, DeepseekV2Config(**shaped(MLA)), "MLA, kv_lora_rank=16"),
        (DeepseekV3ForCausalLM, DeepseekV3Config(**shaped(MLA)), "MLA, kv_lora_rank=16"),
        (MambaForCausalLM, MambaConfig(**shaped()), "found LinearAttentionLayer"),
        (
            JambaForCausalLM,
            JambaConfig(**shaped({"use_mamba_kernels": False})),
            "found LinearAttent",
        ),
        (Qwen3NextForCausalLM, Qwen3NextConfig(**shaped(MOE)), "found LinearAttentionLayer"),
        (T5ForConditionalGeneration, T5Config(**SMALL_T5), "it is an encoder-decoder"),
        (Gemma2ForCausalLM, Gemma2Config(**shaped({"head_dim": 16})), "scores are soft-capped"),
        (GptOssForCausalLM, GptOssConfig(**shaped(MOE, {"head_dim": 16})), "learned sinks"),
        (BloomForCausalLM, BloomConfig(vocab_size=64, hidden_size=16, n_head=2), "do not call"),
        (BertLMHeadModel, BertConfig(**shaped()), "its attention is not causal"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_model_of_another_kind_is_refused(
    kind: type[PreTrainedModel], config: PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        geometry_of(seeded(kind, config))
    assert str(refusal.value).startswith(f"{kind.__name__} cannot be attached: ")


def test_layers_that_share_keys_and_values_are_refused() -> None:
    layers = {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
    }
    widths = {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    model = seeded(Gemma3nForCausalLM, Gemma3nTextConfig(**shaped(layers, widths)))
    with pytest.raises(UnsupportedModelError, match="values of its own in each of 5 layers, found"):
        geometry_of(model)


def test_layers_of_an_unknown_type_are_refused() -> None:
    model = llama()
    model.config.layer_types = ["spiral_attention"] * 3
    with pytest.raises(
        UnsupportedModelError, match="layers of type 'spiral_attention' are unknown"
    ):
        geometry_of(model)


@pytest.mark.parametrize("make_model", [mistral, phi3])
def test_a_model_whose_layers_all_slide_is_refused(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model(sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="all its layers slide, over 64 tokens"):
        geometry_of(model)


@pytest.mark.parametrize(
    ("make_model", "changes"),
    [(gemma3, {"use_bidirectional_attention": True}), (llama, {"is_causal": False})],
)
def test_bidirectional_attention_is_refused(
    make_model: Callable[..., PreTrainedModel], changes: dict[str, bool]
) -> None:
    model = make_model(**changes)
    with pytest.raises(UnsupportedModelError, match="its attention is not causal"):
        geometry_of(model)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype=torch.float64: expected float32, float16"):
        geometry_of(llama().double())


@pytest.mark.parametrize("place", [{"model.norm": "cpu"}, {"model.norm": "disk"}, {"lm_head": 0}])
def test_a_model_with_a_device_map_of_several_places_is_refused(place: dict[str, object]) -> None:
    model = llama()
    model.hf_device_map = {"model.layers": 1} | place  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="is spread over several places"):
        geometry_of(model)


def test_a_device_map_of_one_place_is_fine() -> None:
    model = llama()
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert geometry_of(model).device == torch.device("cpu")


def test_an_offloaded_model_is_refused() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(UnsupportedModelError, match=r"is spread over several places \(meta\)"):
        geometry_of(model)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_arguments_of_attention_that_cannot_be_expressed_are_refused(name: str) -> None:
    """The last line of defence against models that the checks at attaching do not know."""
    keys = torch.zeros(1, 2, 1, 16)
    argument: dict[str, Any] = {name: torch.ones(2)}
    with pytest.raises(UnsupportedModelError, match="tierstore cannot express"):
        attention_forward(torch.nn.Identity(), keys, keys, keys, None, **argument)
