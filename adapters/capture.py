"""Running a model over a text and keeping what its attention saw."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.attention.recorder import QueryRecorder
from tierstore.adapters.generate import check_length, next_logits
from tierstore.errors import ConfigError
from tierstore.kernels.element import to_array
from tierstore.sizes import format_size, parse_size
from tierstore.traces.capture import Capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.kernels.element import Array

WINDOW = 64
LIMIT = "2GiB"


def capture(
    model: PreTrainedModel,
    text: Sequence[int],
    steps: int,
    *,
    window: int = WINDOW,
    with_hidden: bool = False,
    limit: str | int = LIMIT,
    name: str = "",
    document: str = "",
) -> Capture:
    """Keys, values and queries of a model that reads `text` with full attention.

    The last `steps` tokens of the text are fed one by one, as if the model had written them.

    Parameters
    ----------
    window: how many queries of the prompt's end to keep.
    with_hidden: keep also what goes into each layer at each step.
    limit: most bytes that the arrays may have.
    name, document: what the file says it is of; the model's class by default.

    Raises
    ------
    ConfigError: the text is too short, too long for the model, or for `limit`; nothing has run.
    UnsupportedModelError: the model cannot be attached.
    """
    from tierstore.adapters.transformers import attach_engine, geometry_of

    if not 1 <= steps < len(text) - 1 or not window >= 1:
        raise ConfigError(
            f"steps={steps}, window={window}: expected at least 1, and fewer steps than the text "
            f"has tokens ({len(text):,})"
        )
    prompt, forced = text[:-steps], text[-steps:]
    check_length(model, len(prompt), steps)
    geometry = geometry_of(model)
    window = min(window, len(prompt))
    width = model.config.get_text_config().hidden_size if with_hidden else 0
    check_bytes(geometry, len(text), steps, window, width, limit)
    recorder = QueryRecorder(full_engine(geometry, len(text)), window)
    with attach_engine(model, recorder) as cache:
        next_logits(model, prompt, cache.kwargs)
        with _hidden_states(model, keeps=with_hidden) as hidden:
            for token in forced:
                next_logits(model, [token], cache.kwargs)
        return captured(recorder, name or type(model).__name__, document, hidden)


def full_engine(geometry: Geometry, tokens: int) -> SparseAttention:
    """Full attention, with room for so many tokens."""
    kv = geometry.kv_bytes(tokens)
    return SparseAttention(geometry, preset="full", dram=2 * kv + (64 << 20))


def captured(
    recorder: QueryRecorder, model: str, document: str, hidden: Sequence[torch.Tensor] = ()
) -> Capture:
    """What a recorder has kept of a prompt and the steps after it.

    hidden: [steps * layers] tensors [width], the layers of a step one after the other.
    """
    geometry = recorder.geometry
    grouped = geometry.kv_heads, geometry.group
    keys, values = recorder.keys(), recorder.values()
    queries = recorder.queries().unflatten(1, grouped)
    last = recorder.last_queries().unflatten(1, grouped)
    steps = queries.shape[3]
    facts = {
        "model": model,
        "document": document,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "query_heads": geometry.query_heads,
        "head_dim": geometry.head_dim,
        "value_size": geometry.value_size,
        "prompt_tokens": keys.shape[2] - steps,
        "steps": steps,
        "window": last.shape[3],
    }
    states = torch.stack(list(hidden)).unflatten(0, (steps, -1)).transpose(0, 1) if hidden else None
    return Capture(
        _stored(keys),
        _stored(values),
        _stored(queries),
        _stored(last),
        recorder.scale,
        facts,
        None if states is None else _stored(states),
    )


def check_bytes(
    geometry: Geometry, tokens: int, steps: int, window: int, width: int, limit: str | int
) -> None:
    """ConfigError where a capture would have more bytes than `limit`."""
    heads = geometry.kv_heads * (geometry.head_dim + geometry.value_size)
    queries = geometry.query_heads * geometry.head_dim
    elements = tokens * heads + (steps + window) * queries + steps * width
    nbytes = geometry.layers * elements * geometry.dtype.itemsize
    if nbytes > parse_size(limit):
        raise ConfigError(
            f"limit={limit!r}: the capture of {tokens:,} tokens has {format_size(nbytes)}: take "
            "fewer tokens, or raise the limit"
        )


def _stored(tensor: torch.Tensor) -> Array:
    return to_array(tensor.cpu().contiguous())


@contextmanager
def _hidden_states(model: PreTrainedModel, *, keeps: bool) -> Iterator[list[torch.Tensor]]:
    """What goes into each layer that tierstore holds, call by call."""
    from tierstore.adapters.transformers.profile import profile_of

    kept: list[torch.Tensor] = []
    profile = profile_of(model)
    layers: Any = profile.decoder.layers if keeps else ()
    held = [layer for layer, is_held in zip(layers, profile.held, strict=keeps) if is_held]

    def keep(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        kept.append(hidden[0, -1].clone())

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in held]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
