"""Prompts that begin like earlier ones: what is kept is loaded, and only the rest is computed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import xxhash

from tierstore.adapters.attention.engine import SparseAttention
from tierstore.adapters.attention.prefixes import Prefixes
from tierstore.adapters.transformers.profile import rope_types
from tierstore.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from tierstore.adapters.transformers.forward import Forward
    from tierstore.adapters.transformers.session import Session
    from tierstore.keyed import KeyedStore

_BY_LENGTH = frozenset({"dynamic", "longrope"})
_INSIDE = 1 << 62
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "use_cache")


def reuse_for(session: Session, place: str | Path | KeyedStore | Prefixes) -> PrefixReuse:
    """Reuse, in a place, of prompts that this model computed with these weights.

    UnsupportedModelError where keys are not the same in every text that begins alike, or are not
    all held by the engine. ConfigError for an engine that cannot take them.
    """
    profile, engine = session.profile, session.engine
    if not all(profile.held):
        raise UnsupportedModelError(
            f"{profile.name}: prefixes are kept of layers with full attention only, and some of "
            "its layers slide: attach it without prefixes="
        )
    by_length = rope_types(profile.decoder) & _BY_LENGTH
    if by_length:
        raise UnsupportedModelError(
            f"{profile.name}: its rotary angles ({', '.join(by_length)}) depend on the length of "
            "the text, so that keys cannot be used again: attach it without prefixes="
        )
    if not isinstance(engine, SparseAttention):
        raise ConfigError(
            f"prefixes=: the engine is a {type(engine).__name__}, expected a SparseAttention"
        )
    engine.check_lossless()
    given = place if isinstance(place, Prefixes) else Prefixes(place)
    return PrefixReuse(session, engine, given.of(fingerprint(profile.decoder)))


def fingerprint(decoder: PreTrainedModel) -> str:
    """A text that is equal for decoders with equal configuration and weights."""
    config = {
        name: value
        for name, value in decoder.config.to_dict().items()
        if name not in _NOT_THE_MODEL
    }
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weights in decoder.state_dict().items():
        elements = weights.detach().contiguous().cpu()
        digest.update(f"{name} {elements.dtype} {tuple(elements.shape)}".encode())
        digest.update(elements.flatten().view(torch.uint8).numpy())
    return f"{type(decoder).__name__} {digest.hexdigest()}"


class PrefixReuse:
    """Loads the beginning of each new text, and keeps each text as far as it is computed exactly.

    A text is known by its token ids, at positions 0, 1, 2, ... and with padding before it only;
    others are computed as without prefixes.
    """

    def __init__(self, session: Session, engine: SparseAttention, prefixes: Prefixes) -> None:
        self._session, self._engine, self._prefixes = session, engine, prefixes
        self._texts: list[list[int]] | None = None
        """Tokens of each row; None for no text, or one of which not all tokens are known."""
        self._padding: list[int] = []
        self._is_saved = True
        self.loaded: list[int] = []
        """Tokens of each row that were loaded for the texts that the cache holds."""

    def begin(self, arguments: Mapping[str, object]) -> dict[str, object] | None:
        """Take note of a call that the session has begun; of a new text, load what is kept.

        Returns the call for the rest, which the session has begun instead; None if it stays.
        """
        session, is_new = self._session, self._session.length == 0
        assert session.forward is not None, "a call that the session does not know"
        if is_new:
            self._texts = [[] for _ in range(session.forward.rows)]
            self._padding = _padding(session.forward)
            self.loaded = [0] * session.forward.rows
        self._take_in(arguments, is_step=session.forward.tokens == 1 and not is_new)
        if self._texts is None or not is_new:
            return None
        columns = self._engine.load_prefix(self._prefixes, self._texts, padding=self._padding)
        if not columns:
            return None
        self.loaded = [max(0, columns - padding) for padding in self._padding]
        rest = _behind(arguments, columns)
        session.resume(columns)
        session.begin(rest)
        return rest

    def _take_in(self, arguments: Mapping[str, object], *, is_step: bool) -> None:
        """Add the new tokens to the texts, or give them up."""
        session, ids = self._session, arguments.get("input_ids")
        forward = session.forward
        if self._texts is None or forward is None:
            return
        columns = range(session.length, session.length + forward.tokens)
        is_known = isinstance(ids, torch.Tensor) and not is_step
        if not is_known or not _has_usual_positions(arguments, columns, self._padding):
            self._texts = None
            return
        assert isinstance(ids, torch.Tensor)
        for row, (text, padding) in enumerate(zip(self._texts, self._padding, strict=True)):
            text.extend(ids[row, max(0, padding - columns.start) :].tolist())
        self._is_saved = False

    def finish(self) -> None:
        """Keep the texts, now that they are computed."""
        if self._texts is None or self._is_saved:
            return
        whole = [self._engine.kept_tokens(len(text)) for text in self._texts]
        if whole != self.loaded:
            self._engine.save_prefix(self._prefixes, self._texts)
        self._is_saved = True

    def forget(self) -> None:
        """Keep nothing more of texts that were changed otherwise than by a call."""
        self._texts = None


def _padding(forward: Forward) -> list[int]:
    """Columns before the text of each row; more than there are where padding is inside it."""
    if forward.mask is None:
        return [0] * forward.rows
    tokens = forward.mask.sum(1)
    ends = forward.mask.flip(1).cumprod(1).sum(1)
    columns = torch.where(tokens == ends, forward.mask.shape[1] - tokens, _INSIDE)
    padding: list[int] = columns.tolist()
    return padding


def _has_usual_positions(
    arguments: Mapping[str, object], columns: range, padding: Sequence[int]
) -> bool:
    """Whether each text begins at position 0, behind its padding."""
    if max(padding) == _INSIDE:
        return False
    positions = arguments.get("position_ids")
    if positions is None:
        positions = arguments.get("cache_position")
    if positions is None:
        return not any(padding)
    if not isinstance(positions, torch.Tensor) or positions.shape[-1] != len(columns):
        return False
    found = positions.cpu().view(-1, len(columns))
    if positions.dim() > 2 or len(found) not in (1, len(padding)):
        return False
    expected = torch.arange(columns.start, columns.stop) - torch.tensor(padding)[:, None]
    return bool(((found == expected) | (expected < 0)).all())


def _behind(arguments: Mapping[str, object], columns: int) -> dict[str, object]:
    """The same call without its first columns; the mask goes on being about all."""
    rest = dict(arguments)
    for name in ("input_ids", "position_ids", "cache_position"):
        given = rest.get(name)
        if isinstance(given, torch.Tensor):
            rest[name] = given[..., columns:]
    return rest
