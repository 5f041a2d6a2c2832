"""The attention and mask functions that transformers calls for an attached model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from tierstore.adapters.transformers.cache import CACHED_IN
from tierstore.adapters.transformers.forward import custom_mask_error
from tierstore.adapters.transformers.graph import outside_graphs
from tierstore.adapters.transformers.layer import HeldLayer
from tierstore.adapters.transformers.profile import window_can_bind
from tierstore.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

NAME = "tierstore"
"""Name of the attention implementation."""

_dense_attention = AttentionInterface()["sdpa"]
_dense_mask = AttentionMaskInterface()["sdpa"]


def register() -> None:
    """Make the attention implementation known to transformers. Twice does no harm."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


@outside_graphs
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend through the engine where it holds the layer, with sdpa in sliding-window layers."""
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for soft-capped scores, sinks or a position bias, which "
            "tierstore cannot express; use transformers' own cache for this model"
        )
    layer = getattr(key, CACHED_IN, None)
    if layer is None:
        raise ConfigError(
            f"attention {NAME!r} got keys that come from no tierstore cache: attach the model and "
            "pass **cache.kwargs, or call model.set_attn_implementation('sdpa')"
        )
    if not isinstance(layer, HeldLayer):
        output: tuple[torch.Tensor, None] = _dense_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if attention_mask is not None and attention_mask.dim() != 2:
        raise custom_mask_error(f"shape {tuple(attention_mask.shape)}")
    return layer.attend(query, key, value, scaling), None


def attention_mask(
    *,
    mask_function: Callable[..., object],
    config: object,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: object,
) -> torch.Tensor | None:
    """The padding mask as it came for held layers, a 4-D mask for all others.

    What is neither plainly causal nor a window gets a 4-D mask too, and held layers refuse that.
    """
    is_plain = mask_function is causal_mask_function
    if is_plain or (local_size is not None and not window_can_bind(config, local_size)):
        return attention_mask
    mask: torch.Tensor | None = _dense_mask(
        mask_function=mask_function,
        config=config,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )
    return mask
