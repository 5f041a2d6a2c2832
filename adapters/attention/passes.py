"""The forward passes of an engine: layers in order, the same sequences in all of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierstore.adapters.attention.sequences import Sequences
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Passes:
    """Which call may come next, and whose tokens it brings.

    Attributes
    ----------
    sequences: those that the engine holds.
    next_layer: what the next call is for; 0 between passes, -1 when half a pass was lost.
    taking, lanes: the sequences that take part in the running pass, and their lanes.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.sequences = Sequences()
        self.next_layer = 0
        self.taking: list[int] = []
        self.lanes: list[int] = []

    def named(self, layer: int, rows: int, sequences: Sequence[int] | None) -> list[int]:
        """Whose `rows` come: `sequences`, by default all. ConfigError if that cannot be."""
        self.check_whole()
        known = self.sequences.numbers
        named = known if sequences is None else list(sequences)
        if (known or sequences is not None) and len(named) != rows:
            raise ConfigError(
                f"{rows} sequences come, {len(named)} are stored: reset() or select_rows() first"
            )
        if layer != self.next_layer:
            raise ConfigError(
                f"layer {layer} comes, layer {self.next_layer} is next: call every layer once per "
                "pass, in order"
            )
        if layer > 0 and named != self.taking:
            raise ConfigError(f"sequences={named}: expected {self.taking}, as in the layers before")
        if layer == 0:
            self.sequences.lanes(named)
        return named

    def begin(self, layer: int, named: list[int]) -> None:
        """Half a pass is nothing: no layer is next until `succeed`."""
        self.next_layer = -1
        if layer == 0:
            self.taking, self.lanes = named, self.sequences.lanes(named)

    def succeed(self, layer: int) -> None:
        """A layer has been computed."""
        self.next_layer = (layer + 1) % self._layers

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Between passes, and whole again only if the change succeeds."""
        self.check_between()
        self.next_layer = -1
        yield
        self.next_layer = 0

    def check_between(self) -> None:
        """ConfigError while a pass runs."""
        self.check_whole()
        if self.next_layer != 0:
            raise ConfigError(f"layer {self.next_layer} is next: finish the pass first")

    def check_whole(self) -> None:
        """ConfigError if half a pass, or half a change, was lost."""
        if self.next_layer < 0:
            raise ConfigError("an earlier call failed, and what is stored is incomplete: reset()")
