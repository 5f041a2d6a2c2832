"""What the benchmarks on a language model share: its text, its sizes, its copies."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 8  # more than real text has


def real_text(tokenizer: PreTrainedTokenizerBase, tokens: int, start: int = 0) -> list[int]:
    """Tokens of `pydoc_data.topics`: the same for everyone with the same Python version.

    start: character that they begin at. ConfigError if there are fewer behind it.
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())[start:][: _CHARACTERS_PER_TOKEN * tokens]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)[:tokens]
    if len(ids) < tokens:
        raise ConfigError(
            f"tokens: the text has {len(ids):,}, and {tokens:,} are needed; ask for fewer"
        )
    return ids


def check_window(model: PreTrainedModel, tokens: int) -> None:
    """ConfigError where the model cannot read so many tokens."""
    limit = model.config.get_text_config().max_position_embeddings
    if tokens > limit:
        raise ConfigError(
            f"tokens: {tokens:,} are needed, with those that are decoded, and the model reads at "
            f"most {limit:,}; ask for fewer"
        )


def kv_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    from tierstore.adapters.transformers import geometry_of

    return geometry_of(model).kv_bytes(tokens)


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model over the same weights, so that each of several caches can have one attached."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
