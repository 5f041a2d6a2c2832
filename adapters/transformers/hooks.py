"""Forward hooks on an attached decoder: a call is checked once, before its first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.adapters.transformers.attention import NAME
from tierstore.adapters.transformers.graph import outside_graphs
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.adapters.transformers.cache import TierCache
    from tierstore.adapters.transformers.session import Session


class DecoderHooks:
    """Lets a decoder run only with the cache it is attached to, and in ways that tierstore serves.

    Without them a call that lost its cache would go on unnoticed; some models' generate drops it.
    """

    def __init__(self, cache: TierCache, session: Session) -> None:
        self._cache = cache
        self._session = session
        self._profile = session.profile
        self._reuse = cache.reuse

    @outside_graphs
    def before_forward(
        self, decoder: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Check the call and start a forward pass; returns the call where only its end is left."""
        named = dict(zip(self._profile.parameters, args, strict=False)) | kwargs if args else kwargs
        self._check_cache(named.get(self._profile.keyword, named.get("past_key_values")))
        self._check_mode(named)
        self._session.begin(named)
        rest = None if self._reuse is None else self._reuse.begin(named)
        return None if rest is None else ((), rest)

    @outside_graphs
    def after_forward(self, decoder: torch.nn.Module, args: object, output: object) -> None:
        """Make the new tokens part of the past."""
        self._session.finish()
        if self._reuse is not None:
            self._reuse.finish()

    def _check_cache(self, given: object) -> None:
        if given is self._cache:
            return
        name = self._profile.name
        limit = getattr(self._profile.decoder.config, "original_max_position_embeddings", None)
        if given is None and limit is not None:
            raise ConfigError(
                f"{name} was called without its tierstore cache: pass **cache.kwargs; and as its "
                "generate drops the cache of a text beyond original_max_position_embeddings="
                f"{limit}, compute such a text first: model(input_ids[:, :-1], **cache.kwargs)"
            )
        found = "no cache" if given is None else f"another cache ({type(given).__name__})"
        raise ConfigError(
            f"{name} is attached to tierstore and was called with {found}: pass **cache.kwargs, or "
            "close the tierstore cache first"
        )

    def _check_mode(self, arguments: Mapping[str, object]) -> None:
        decoder, name = self._profile.decoder, self._profile.name
        if decoder.config._attn_implementation != NAME:
            raise ConfigError(
                f"{name} was switched to attention {decoder.config._attn_implementation!r} while "
                f"its tierstore cache is open: call model.set_attn_implementation({NAME!r}), or "
                "close the cache"
            )
        if decoder.training:
            raise ConfigError(f"{name} is in training mode: call model.eval() first")
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{name} was called with gradients enabled, which do not flow through tierstore: "
                "call it under torch.no_grad() or torch.inference_mode()"
            )
        if arguments.get("output_attentions") or decoder.config.output_attentions:
            raise ConfigError(
                "output_attentions=True: tierstore never forms attention weights; leave it out, or "
                "close the cache and use attn_implementation='eager'"
            )
