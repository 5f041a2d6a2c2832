"""What the adapter must know about a model, and which models it cannot serve."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierstore.adapters.attention.geometry import Geometry
from tierstore.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class ModelProfile:
    """A model that can be served.

    Attributes
    ----------
    name: class of the model, for messages.
    decoder: the part that runs the layers.
    parameters: names of its forward's parameters, in order.
    held: per layer, whether the engine holds it; the other layers slide and stay transformers' own.
    max_tokens: most tokens a row may have before a sliding window of a held layer would matter.
    rope_switch: token count beyond which LongRoPE rotates all keys differently.
    """

    name: str
    decoder: PreTrainedModel
    parameters: tuple[str, ...]
    held: tuple[bool, ...]
    geometry: Geometry
    max_tokens: int | None
    rope_switch: int | None

    @property
    def keyword(self) -> str:
        """What the forward calls its cache; the name changed between transformers 5.19 and 5.24."""
        return "cache" if "cache" in self.parameters else "past_key_values"

    def own_layers(self) -> list[DynamicLayer]:
        """New, empty layers as transformers' own cache would have them."""
        layers = DynamicCache(config=self.decoder.config).layers
        return [layer for layer in layers if isinstance(layer, DynamicLayer)]


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Shapes, dtype and device of the layers that an engine for `model` has to hold.

    Raises UnsupportedModelError where the model cannot be served.
    """
    return profile_of(model).geometry


def profile_of(model: PreTrainedModel) -> ModelProfile:
    """Read a model's profile.

    Raises UnsupportedModelError where it cannot be served, ConfigError for a wrong dtype.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}: expected a transformers PreTrainedModel; attach "
            "before wrapping it (torch.compile, DataParallel, adapters)"
        )
    if model.config.is_encoder_decoder:
        raise _unsupported(model, "it is an encoder-decoder")
    decoder = model.get_decoder()
    windows = _windows(model, decoder)
    held = tuple(
        window is None or not window_can_bind(decoder.config, window) for window in windows
    )
    if not any(held):
        raise _unsupported(model, f"all its layers slide, over {windows[0]} tokens")
    _check_attention(model, decoder)
    return ModelProfile(
        name=type(model).__name__,
        decoder=decoder,
        parameters=tuple(inspect.signature(decoder.forward).parameters),
        held=held,
        geometry=_geometry(model, decoder, layers=sum(held)),
        max_tokens=min(
            (window for window, is_held in zip(windows, held, strict=True) if window and is_held),
            default=None,
        ),
        rope_switch=_rope_switch(decoder),
    )


def window_can_bind(config: object, window: int) -> bool:
    """Whether a sliding window is shorter than the longest text of the model."""
    return window < getattr(config, "max_position_embeddings", window + 1)


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be attached: {reason}; use transformers' own cache for it"
    )


def _windows(model: PreTrainedModel, decoder: PreTrainedModel) -> list[int | None]:
    """Sliding window of each layer, None where it attends to everything."""
    config = decoder.config
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise _unsupported(model, f"layers of type {error} are unknown") from error
    known = DynamicLayer, DynamicSlidingWindowLayer
    strange = {type(layer).__name__ for layer in layers if type(layer) not in known}
    if strange or len(layers) != config.num_hidden_layers:
        raise _unsupported(
            model,
            "expected full or sliding attention with keys and values of its own in each of "
            f"{config.num_hidden_layers} layers, found {', '.join(sorted(strange)) or len(layers)}",
        )
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _check_attention(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    rank = getattr(decoder.config, "kv_lora_rank", None)
    if rank is not None:
        raise _unsupported(model, f"it stores latents instead of keys (MLA, kv_lora_rank={rank})")
    if not decoder._supports_attention_backend:
        raise _unsupported(model, "its layers do not call transformers' attention interface")
    for part in (decoder.config, *decoder.modules()):
        if getattr(part, "sinks", None) is not None:
            raise _unsupported(model, "its attention has learned sinks")
        if getattr(part, "attn_logit_softcapping", None) is not None:
            raise _unsupported(model, "its attention scores are soft-capped")
        if not getattr(part, "is_causal", True):
            raise _unsupported(model, "its attention is not causal")


def _geometry(model: PreTrainedModel, decoder: PreTrainedModel, layers: int) -> Geometry:
    config = decoder.config
    query_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return Geometry(
        layers=layers,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=head_dim,
        dtype=decoder.dtype,
        device=_only_device(model, decoder),
    )


def _only_device(model: PreTrainedModel, decoder: PreTrainedModel) -> torch.device:
    placed = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    devices = {parameter.device for parameter in decoder.parameters()}
    if len(placed) > 1 or "disk" in placed or len(devices) > 1 or torch.device("meta") in devices:
        found = ", ".join(sorted(placed | {str(device) for device in devices}))
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over several places ({found}): expected one device; "
            "load it with device_map set to that device"
        )
    return devices.pop()


def rope_types(decoder: PreTrainedModel) -> frozenset[str]:
    """How the model's layers rotate keys, by transformers' names."""
    return frozenset(str(each.get("rope_type")) for each in _rope_parameters(decoder))


def _rope_parameters(decoder: PreTrainedModel) -> list[Mapping[str, object]]:
    """Rotary parameters; models with several kinds of layers have them for each kind."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return [each for each in (rope, *rope.values()) if isinstance(each, Mapping)]


def _rope_switch(decoder: PreTrainedModel) -> int | None:
    for parameters in _rope_parameters(decoder):
        if parameters.get("rope_type") == "longrope":
            switch = parameters["original_max_position_embeddings"]
            assert isinstance(switch, int)
            return switch
    return None
