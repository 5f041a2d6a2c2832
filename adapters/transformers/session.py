"""The state that one attached model's cache, layers and hooks share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.transformers.forward import (
    Forward,
    merge_padding,
    new_shape,
    nothing_new_error,
    padding_mask,
)
from tierstore.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.adapters.transformers.engine import AttentionEngine
    from tierstore.adapters.transformers.profile import ModelProfile


class _Asked(Exception):
    """Carries a query out of the attention module that asks it."""

    def __init__(self, query: torch.Tensor) -> None:
        super().__init__()
        self.query = query


class Session:
    """Follows the forward passes of one model and hands their keys and values to the engine.

    A pass is checked once, by `begin`; then each held layer attends once, and `finish` makes the
    new tokens part of the past. A pass that failed in between leaves `forward` set and layers of
    unequal length: only `reset` helps then.
    """

    def __init__(self, profile: ModelProfile, engine: AttentionEngine) -> None:
        self.profile = profile
        self.engine = engine
        self.forward: Forward | None = None
        self.rows = 0
        self.length = 0
        self.mask: torch.Tensor | None = None
        self.is_closed = False

    def begin(self, arguments: Mapping[str, object]) -> None:
        """Check the call of a forward pass and start it; nothing has happened if this raises."""
        if self.forward is not None:
            raise ConfigError(
                "an earlier forward pass failed and left the cache half written: call cache.reset()"
                " and compute the text again"
            )
        rows, tokens = new_shape(arguments)
        total = self.length + tokens
        self._check_shape(rows, tokens)
        self._check_window(total)
        self._check_rope(total)
        given = padding_mask(arguments)
        if given is None:
            self._check_positions(arguments.get("position_ids"))
        else:
            given = given.to(self.profile.geometry.device)
        mask, valid = merge_padding(self.mask, given, (rows, total), tokens)
        is_step = tokens == 1 and self.length > 0
        self.forward = Forward(rows, tokens, mask, valid, is_step)

    def resume(self, columns: int) -> None:
        """Have the first columns of the pass that was begun, and no pass: the engine has them."""
        forward = self.forward
        assert forward is not None, "columns of a forward pass that never began"
        self.rows, self.length, self.forward = forward.rows, columns, None
        if forward.mask is not None:
            self._keep_mask(forward.mask[:, :columns])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Output of held layer `layer`, [rows, tokens, query heads, head_dim]."""
        forward = self.forward
        assert forward is not None, "attention without a forward pass"
        if forward.is_guessing:
            raise _Asked(query)
        if not forward.is_step:
            self._check_heads(query, key, value)
        forward.attended += 1
        if scale is None:
            scale = query.shape[-1] ** -0.5
        guess, forward.next_query = forward.next_query, None
        return self._through_engine(layer, query, key, value, scale, guess)

    def _through_engine(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        next_query: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.forward is not None
        attend: Callable[..., torch.Tensor] = self.engine.attend
        if next_query is not None:
            attend = partial(attend, next_query=next_query)
        return attend(layer, query, key, value, valid=self.forward.valid, scale=scale)

    def query_of(self, attention: Callable[[], object]) -> torch.Tensor | None:
        """What `attention`, the forward of a held layer's module, asks; it gets no answer.

        None if it ends without asking.
        """
        forward = self.forward
        assert forward is not None, "a guess without a forward pass"
        forward.is_guessing = True
        try:
            attention()
        except _Asked as asked:
            return asked.query
        finally:
            forward.is_guessing = False
        return None

    def finish(self) -> None:
        """Make the tokens of the forward pass part of the past."""
        forward = self.forward
        assert forward is not None, "the end of a forward pass that never began"
        held = self.profile.geometry.layers
        if forward.attended != held:
            raise UnsupportedModelError(
                f"{self.profile.name}: {forward.attended} layers attended through tierstore in a "
                f"forward pass, expected {held}; use transformers' own cache for this model"
            )
        self.rows, self.mask = forward.rows, forward.mask
        self.length += forward.tokens
        self.forward = None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i what `rows[i]` was."""
        self.engine.select_rows(rows)
        self.rows = len(rows)
        if self.mask is not None:
            self._keep_mask(self.mask[list(rows)])

    def check_crop(self, tokens: int) -> None:
        """ConfigError where the last `tokens` tokens cannot be forgotten in all rows alike."""
        left = self.length - tokens
        is_text = self.mask is None or bool(self.mask[:, max(left, 0) :].all())
        if tokens < 0 or left < 0 or not is_text:
            raise ConfigError(
                f"crop({-tokens}): expected minus a number of tokens, at most the {self.length} "
                "that the cache holds, and all of them text in every row"
            )
        self._check_rope(left)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens. Requires: `check_crop(tokens)` passes."""
        self.engine.crop(tokens)
        self.length -= tokens
        if self.mask is not None:
            self._keep_mask(self.mask[:, : self.length])

    def reset(self) -> None:
        """Forget everything."""
        self.engine.reset()
        self.forward = None
        self.rows = self.length = 0
        self.mask = None

    def stray_error(self) -> ConfigError:
        """The error for keys and values that come outside a forward pass of the attached model."""
        if self.is_closed:
            return ConfigError(
                "the tierstore cache is closed: attach the model again for a new one"
            )
        return ConfigError(
            f"the cache of an attached {self.profile.name} was used outside its forward pass: pass "
            "it only to the model it was made for, called as model(...) or model.generate(...)"
        )

    def _keep_mask(self, mask: torch.Tensor) -> None:
        self.mask = None if bool(mask.all()) else mask

    def _check_shape(self, rows: int, tokens: int) -> None:
        if tokens == 0:
            raise nothing_new_error(self.length)
        if self.rows and rows != self.rows:
            raise ConfigError(
                f"the call has {rows} rows, the cache holds {self.rows}: first call "
                "cache.batch_repeat_interleave, cache.batch_select_indices or cache.reset"
            )

    def _check_window(self, total: int) -> None:
        limit = self.profile.max_tokens
        if limit is not None and total > limit:
            raise UnsupportedModelError(
                f"the text grows to {total} tokens, beyond the sliding window of {limit} that "
                f"{self.profile.name} has in every layer; keep it within the window"
            )

    def _check_rope(self, total: int) -> None:
        past, switch = self.length, self.profile.rope_switch
        if switch is None or not past or not total or (past > switch) == (total > switch):
            return
        raise ConfigError(
            f"the text goes from {past} to {total} tokens, and beyond {switch} LongRoPE rotates "
            "every key differently: call cache.reset() and compute the whole text in one call, "
            "model(input_ids[:, :-1], **cache.kwargs), before generating"
        )

    def _check_positions(self, positions: object) -> None:
        # Without a mask, only positions tell that generate starts a stored text again.
        if not self.length or not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            return
        if int(positions[0, 0]) < self.length:
            raise nothing_new_error(self.length)

    def _check_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        shape = self.profile.geometry
        found = (query.shape[1], *key.shape[1::2], value.shape[3], key.dtype, value.dtype)
        expected = (
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.value_size,
            shape.dtype,
            shape.dtype,
        )
        if found != expected:
            raise UnsupportedModelError(
                f"{self.profile.name} attends with (query heads, KV heads, key width, value width, "
                f"key dtype, value dtype) = {found}: expected {expected} from its configuration "
                "and weights; call it without autocast, or use transformers' own cache"
            )
