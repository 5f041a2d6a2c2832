"""Guesses of what the next layer will ask, from what enters the attention of this one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tierstore.adapters.transformers.graph import outside_graphs
from tierstore.errors import UnsupportedModelError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import nn

    from tierstore.adapters.transformers.profile import ModelProfile
    from tierstore.adapters.transformers.session import Session

_ROTARY = "position_embeddings"


class Guesses:
    """Hooks that guess, in a decoding step, in one held layer what the next one will ask.

    InfiniGen's guess: the residual stream changes little from layer to layer, so the hidden states
    that enter a layer's attention, normalised for that layer, stand for those of the next. They go
    through the next held layer's own attention module until it asks; so projection, norms and
    rotary embedding are the model's. Its keys and values are made too, and dropped.

    The model's first layer guesses nothing, as published: it changes the stream most. Nor is there
    a guess for a layer before one of its kind was called in the pass: kinds of layers may have
    rotary tables of their own.

    UnsupportedModelError for a model without attention modules where they are looked for.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._modules, self._kinds = _held_attention(session.profile)
        self._first = 1 if session.profile.held[0] else 0
        """The first held layer that guesses."""
        self._rotary: dict[str, dict[str, object]] = {}
        """Keyword arguments with the rotary tables of each kind that this pass has called."""

    def attach(self, detach: ExitStack) -> None:
        """Hook the modules up; `detach` lets them go."""
        for number, module in enumerate(self._modules):
            hook = partial(self._before_attention, number)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            detach.callback(handle.remove)

    @outside_graphs
    def _before_attention(
        self, number: int, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        forward = self._session.forward
        if forward is None or not forward.is_step:
            return
        if number == 0:
            self._rotary.clear()
        own, following = self._kinds[number], number + 1
        self._rotary[own] = {name: kwargs[name] for name in (_ROTARY,) if name in kwargs}
        if number < self._first or following == len(self._modules):
            return
        if self._kinds[following] not in self._rotary:
            return
        attention = self._modules[following]
        given = kwargs | self._rotary[self._kinds[following]]
        forward.next_query = self._session.query_of(partial(attention.forward, *args, **given))
        if forward.next_query is None:
            raise UnsupportedModelError(
                f"{type(attention).__name__} does not attend when it is called, so that its query "
                "cannot be guessed: attach the model with another schedule="
            )


def _held_attention(profile: ModelProfile) -> tuple[list[nn.Module], list[str]]:
    """Attention module and kind of each held layer."""
    decoder = profile.decoder
    layers: Any = getattr(decoder, "layers", ())
    modules = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if len(modules) != len(profile.held):
        raise UnsupportedModelError(
            f"{profile.name} has no self_attn in each of its decoder's {len(profile.held)} layers, "
            "with which schedule='previous-layer' guesses: attach it with another schedule="
        )
    kinds = getattr(decoder.config, "layer_types", None) or [""] * len(modules)
    held = [each for each in zip(modules, kinds, profile.held, strict=True) if each[2]]
    return [module for module, _, _ in held], [kind for _, kind, _ in held]
