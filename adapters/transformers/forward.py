"""Reading one call of the decoder: what it brings, and what it must not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tierstore.errors import ConfigError


@dataclass(slots=True)
class Forward:
    """A forward pass that is under way.

    Attributes
    ----------
    rows, tokens: shape of the new input.
    mask: bool [rows, stored + new tokens], False at padding; None when no token is padding.
    valid: the part of `mask` for the new tokens; None when none of them is padding.
    is_step: whether it brings one more token of each row; only then layers compare no shapes.
    attended: held layers that have attended so far.
    next_query: a guess of what the next held layer will ask, until the engine has it.
    is_guessing: whether what attends now does so for a guess alone.
    """

    rows: int
    tokens: int
    mask: torch.Tensor | None
    valid: torch.Tensor | None
    is_step: bool
    attended: int = 0
    next_query: torch.Tensor | None = None
    is_guessing: bool = False


def new_shape(arguments: Mapping[str, object]) -> tuple[int, int]:
    """Rows and tokens of a call."""
    inputs = arguments.get("input_ids")
    if inputs is None:
        inputs = arguments.get("inputs_embeds")
    if not isinstance(inputs, torch.Tensor):
        raise ConfigError("the model was called without input_ids and without inputs_embeds")
    return inputs.shape[0], inputs.shape[1]


def padding_mask(arguments: Mapping[str, object]) -> torch.Tensor | None:
    """The 2-D mask of a call; None where it has none."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Mapping):
        # A multimodal model made its masks already; for held layers that is the mask it was given.
        mask = mask.get("full_attention")
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask)
        raise custom_mask_error(found)
    return mask


def custom_mask_error(found: object) -> ConfigError:
    """The error for every mask that says more than which tokens are padding."""
    return ConfigError(
        f"attention_mask has {found}: expected a 2-D padding mask [rows, stored + new tokens]; "
        "tierstore attends causally and cannot apply custom masks"
    )


def merge_padding(
    stored: torch.Tensor | None, given: torch.Tensor | None, shape: tuple[int, int], tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Padding after a call, and of its last `tokens` tokens; None stands for none.

    Parameters
    ----------
    stored: bool [rows, earlier tokens], what the earlier calls said; None for no padding.
    given: [rows, all tokens], what this call says.
    shape: rows and all tokens, as they have to be.
    """
    past = shape[1] - tokens
    if given is None:
        if stored is not None:
            raise _contradiction("no attention_mask, or one without padding")
        return None, None
    if given.shape[1] <= past:
        raise nothing_new_error(past)
    if tuple(given.shape) != shape:
        raise ConfigError(
            f"attention_mask has shape {tuple(given.shape)}: expected {shape}, a column for each "
            f"of {past} stored and {tokens} new tokens"
        )
    if bool(given.all()):
        return merge_padding(stored, None, shape, tokens)
    mask = given.to(torch.bool, copy=True)
    before, valid = mask[:, :past], mask[:, past:]
    if not (before.all() if stored is None else torch.equal(before, stored)):
        raise _contradiction("other padding")
    return mask, None if bool(valid.all()) else valid


def nothing_new_error(past: int) -> ConfigError:
    """The error for a call whose text does not go beyond what is stored.

    Without it, transformers computes the whole prompt again and appends it to itself.
    """
    return ConfigError(
        f"the cache already holds {past} tokens and this call brings none after them: call "
        "cache.crop(-1) to generate from the same text again, or cache.reset() for another text"
    )


def _contradiction(found: str) -> ConfigError:
    return ConfigError(
        f"this call has {found} for the tokens that the cache holds: pass the attention_mask of "
        "the earlier calls, extended by the new tokens (generate guesses one from pad tokens where "
        "it gets none), or call cache.reset() to start another text"
    )
