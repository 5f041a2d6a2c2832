"""Randomly initialised language models, small enough to generate in milliseconds."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import (
    Cache,
    DynamicCache,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    class LanguageModel(PreTrainedModel, GenerationMixin):
        """What all models here are."""


SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def shaped(*changes: Mapping[str, object]) -> dict[str, Any]:
    """`SHAPE` with changes, later ones over earlier ones, as arguments of a configuration."""
    shape = SHAPE.copy()
    for change in changes:
        shape.update(change)
    return shape


def seeded(kind: type[PreTrainedModel], config: PreTrainedConfig) -> LanguageModel:
    """A model whose weights depend on the configuration only, ready to generate."""
    torch.manual_seed(0)
    # Larger than usual weights, so that attention decides which token comes next.
    config.initializer_range = 0.25
    return cast("LanguageModel", kind(config).eval())


def llama(**changes: object) -> LanguageModel:
    return seeded(LlamaForCausalLM, LlamaConfig(**shaped(changes)))


def qwen3(**changes: object) -> LanguageModel:
    return seeded(Qwen3ForCausalLM, Qwen3Config(**shaped({"head_dim": 24}, changes)))


def qwen3_with_some_sliding_layers() -> LanguageModel:
    return qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1)


def phi3(**changes: object) -> LanguageModel:
    return seeded(Phi3ForCausalLM, Phi3Config(**shaped(changes)))


def phi3_with_longrope(switch: int = 64) -> LanguageModel:
    """Beyond `switch` tokens it rotates keys by other angles."""
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": switch,
    }
    return phi3(rope_parameters=rope, original_max_position_embeddings=switch)


def mistral(**changes: object) -> LanguageModel:
    return seeded(MistralForCausalLM, MistralConfig(**shaped({"sliding_window": None}, changes)))


def gemma3(**changes: object) -> LanguageModel:
    """Its layers 0 and 2 slide over 8 tokens; layers 1 and 3 are full."""
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4, "layer_types": kinds}
    # Tied, its scaled embeddings would make every next token the one before it.
    untied = {"tie_word_embeddings": False}
    return seeded(Gemma3ForCausalLM, Gemma3TextConfig(**shaped(own, untied, changes)))


def gemma3_multimodal() -> LanguageModel:
    """The text model of `gemma3` inside the model that also reads images."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=gemma3().config,
        vision_config=vision | {"intermediate_size": 16, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=120,
        tie_word_embeddings=False,
    )
    return seeded(Gemma3ForConditionalGeneration, config)


ARCHITECTURES: list[Callable[[], LanguageModel]] = [
    llama,
    qwen3,
    qwen3_with_some_sliding_layers,
    phi3,
    phi3_with_longrope,
    mistral,
    gemma3,
    gemma3_multimodal,
]


def random_ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    """Text of `rows` rows without padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 120, (rows, tokens), generator=generator)


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    """A batch of texts of these lengths, ending together."""
    ids = random_ids(len(lengths), max(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def own_cache(model: LanguageModel) -> dict[str, Cache]:
    """A new cache of transformers' own, as a keyword argument of the model."""
    parameters = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in parameters else "past_key_values"
    return {keyword: DynamicCache(config=model.config.get_text_config())}
