"""Batches that begin with prompts computed before, and prompts of a batch kept for later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.attention.batch import Batch
from tierstore.adapters.attention.lanes import Admitted
from tierstore.adapters.attention.prefix_records import (
    PrefixRecords,
    SavedText,
    joined,
    piece_tokens,
    state_rows,
)
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.placement import assign_homes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.adapters.attention.prefix_records import Found, State
    from tierstore.adapters.attention.prefixes import Prefixes
    from tierstore.adapters.attention.rules import Rules
    from tierstore.chain import Tokens
    from tierstore.interfaces import Bytes, Ids, Pointers, Tier
    from tierstore.layout import BlockLayout
    from tierstore.saving import SavedRun

_LEFT = 2
"""Tokens that are left to compute: a single one would be a step, which is not exact."""


def load_batch(
    prefixes: Prefixes,
    rules: Rules,
    layout: BlockLayout,
    tiers: Sequence[Tier],
    texts: Sequence[Tokens | Sequence[int]],
    padding: Sequence[int] | None,
) -> tuple[Batch | None, int]:
    """A batch with the beginnings of texts that are kept, and the columns that it covers.

    Text r stands in a row behind ``padding[r]`` columns, or none. All rows get as many columns as
    the one of which least is kept; None and 0 if that are none.
    """
    check_lossless(tiers)
    pads = np.zeros(len(texts), np.int64) if padding is None else np.array(padding, np.int64)
    if not len(texts) or len(pads) != len(texts):
        raise ConfigError(f"{len(texts)} texts, padding={padding}: expected a number for each")
    with prefixes.opened(to_save=False) as store:
        if store is None:
            return None, 0
        records = PrefixRecords(store, layout, rules, prefixes.model)
        found = [records.find(text[: max(0, len(text) - _LEFT)]) for text in texts]
        columns = min(
            pad + (0 if one is None else one.tokens)
            for pad, one in zip(pads.tolist(), found, strict=True)
        )
        wanted = np.maximum(columns - pads, 0)
        scales = {one.scale for one, n in zip(found, wanted, strict=True) if one is not None and n}
        if len(scales) != 1:
            return None, 0
        (scale,) = scales
        known = {i: one for i, one in enumerate(found) if one is not None and wanted[i]}
        first = next(iter(known))
        with records.begin(known[first], int(wanted[first])) as run:
            promised = [Admitted(int(tokens), rules.budget) for tokens in wanted]
            batch = Batch(rules, layout, tiers, promised, scale)
            loading = _Loading(batch, records, known, wanted)
            loading.restore_indexes()
            loaded = loading.load_blocks(run)
        columns = min(columns, int((pads + loaded)[wanted > 0].min()))
        loading.cut(loaded, np.maximum(columns - pads, 0))
    return (batch, columns) if batch.tokens.any() else (None, 0)


class _Loading:
    """Fills a new batch: indexes first, since what they leave of the tiers is for blocks."""

    def __init__(
        self,
        batch: Batch,
        records: PrefixRecords,
        found: Mapping[int, Found],
        wanted: Pointers,
    ) -> None:
        self._batch, self._records = batch, records
        self._found, self._wanted = found, wanted
        self._homes: dict[int, Bytes] = {}
        """Where blocks were, of the sequences whose index is kept."""

    def restore_indexes(self) -> None:
        """Take over the indexes that are kept; the others are made from keys in the end."""
        layers, states = self._batch.layers, dict[int, "list[State]"]()
        for sequence, found in self._found.items():
            kept = self._records.load_index(found, int(self._wanted[sequence]), len(layers))
            if kept is not None and kept[1].shape[1] >= layers[0].sealed(found.tokens):
                states[sequence], self._homes[sequence] = kept
        if not states:
            return
        try:
            for number, layer in enumerate(layers):
                own = [
                    states[sequence][number] if sequence in states else None
                    for sequence in range(layer.sequences)
                ]
                layer.restore_index(joined(own, layer.heads))
        except StoreMismatchError:  # all layers have the same index, so the first one said so
            self._homes.clear()

    def load_blocks(self, run: SavedRun) -> Pointers:
        """Bring blocks and sinks; returns the tokens of each sequence. run: that of the first."""
        batch, loaded = self._batch, np.zeros_like(self._wanted)
        batch.hold(self._wanted)
        for number, (sequence, found) in enumerate(self._found.items()):
            segments = batch.segments_of(sequence)
            homes = self._assigned(sequence, segments)
            if number:
                run = self._records.begin(found, int(self._wanted[sequence]))
            with run:
                loaded[sequence] = run.append_to(batch.store, segments, homes=homes)
            loaded[sequence] += found.sinks[0].shape[2]
            for layer, key, value in zip(batch.layers, *found.sinks, strict=True):
                layer.take_over(sequence, key, value)
        return loaded

    def _assigned(self, sequence: int, segments: Ids) -> Bytes | None:
        """Homes for the present tiers: what stood higher then goes higher now."""
        store = self._batch.store
        if store.backing == 0 or sequence not in self._homes:
            return None
        weight = -self._homes[sequence].astype(np.float32)
        return assign_homes(weight, self._batch.warm_up.room(segments))

    def cut(self, loaded: Pointers, left: Pointers) -> None:
        """Keep the first `left` of the loaded tokens, the last ones in the local window."""
        for layer in self._batch.layers:
            for sequence in self._found:
                rows = layer.rows(sequence)
                before = int(layer.blocks[rows][0])
                layer.crop(sequence, int(loaded[sequence] - left[sequence]))
                if sequence not in self._homes:
                    layer.rebuild_index(sequence)
                elif int(layer.blocks[rows][0]) == before:  # otherwise the crop cut it
                    layer.index.truncate(rows, before)
        self._batch.hold(left)


def save_texts(
    prefixes: Prefixes,
    rules: Rules,
    batch: Batch,
    texts: Sequence[Tokens | Sequence[int]],
) -> list[int]:
    """Keep the beginning of each sequence, which has these tokens; returns how many of each."""
    check_lossless(batch.store.tiers)
    have = batch.tokens.tolist()
    if len(texts) != len(have) or any(map(int.__lt__, have, map(len, texts))):
        raise ConfigError(
            f"texts of {[len(text) for text in texts]} tokens: expected one for each sequence, no "
            f"longer than what is stored, {have}"
        )
    with prefixes.opened(to_save=True) as store:
        if store is None:
            return [0] * len(texts)
        records = PrefixRecords(store, batch.store.layout, rules, prefixes.model)
        states = [layer.index.state() for layer in batch.layers]
        return [_save(records, rules, batch, states, *each) for each in enumerate(texts)]


def _save(
    records: PrefixRecords,
    rules: Rules,
    batch: Batch,
    states: Sequence[State],
    sequence: int,
    tokens: Tokens | Sequence[int],
) -> int:
    text, first = _saved(batch, rules, sequence), batch.layers[0]
    saved, chain = records.save(tokens, text)
    own = [state_rows(state, first.rows(sequence), len(first.segments)) for state in states]
    whole = [state for state in own if state is not None]
    if chain is not None and len(whole) == len(own):
        blocks = int(first.blocks[first.rows(sequence)][0])
        records.save_index(chain, whole, batch.store.levels(text.segments, blocks))
    return saved


def kept_tokens(rules: Rules, tokens: int) -> int:
    """How many of a text's tokens are kept: the sinks, and whole pieces behind them."""
    piece = piece_tokens(rules.preset.block_tokens)
    pieces = (tokens - rules.preset.sinks) // piece
    return rules.preset.sinks + pieces * piece if pieces > 0 else 0


def check_lossless(tiers: Sequence[Tier]) -> None:
    """ConfigError if a tier changes what it stores."""
    lossy = [tier.name for tier in tiers if not tier.is_lossless]
    if lossy:
        raise ConfigError(
            f"prefixes: tier {lossy[0]!r} changes what it stores, and prefixes are kept as they "
            "were computed: choose a lossless codec for it, or no prefixes"
        )


def _saved(batch: Batch, rules: Rules, sequence: int) -> SavedText:
    sinks, size = rules.preset.sinks, rules.preset.block_tokens
    strips = [layer.strip(sequence) for layer in batch.layers]
    key, value = (torch.stack(parts) for parts in zip(*strips, strict=True))
    blocks = max(0, key.shape[2] - sinks) // size
    behind = slice(sinks, sinks + blocks * size)
    layout = batch.store.layout
    pieces = [part[:, :, behind].unflatten(2, (blocks, size)) for part in (key, value)]
    packed = layout.pack(dict(zip(("k", "v"), pieces, strict=True))).cpu().numpy()
    return SavedText(
        scale=batch.scale,
        sinks=(key[:, :, :sinks], value[:, :, :sinks]),
        store=batch.store,
        segments=batch.segments_of(sequence),
        tail=packed.reshape(-1, blocks, layout.block_bytes),
    )
