"""What the adapter asks of an attention engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.report import Report


class AttentionEngine(Protocol):
    """Keeps the keys and values of the held layers and attends over them.

    `tierstore.adapters.attention.SparseAttention` is one; any object with these methods can be
    attached. It is called by one thread at a time. Layers are numbered from 0 over the held ones,
    and every forward pass calls each of them once, in order.
    """

    @property
    def geometry(self) -> Geometry:
        """The geometry it was made for."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        scale: float,
    ) -> torch.Tensor:
        """Store new keys and values, then attend causally over everything stored in the layer.

        Parameters
        ----------
        query: [rows, query heads, tokens, head_dim], rotary positions applied.
        key, value: [rows, KV heads, tokens, head_dim], the new tokens only.
        valid: bool [rows, tokens]; False marks padding, which is not stored. None: all are text.
        scale: factor on the scores before softmax.

        Returns [rows, tokens, query heads, head_dim] in the query's dtype. Outputs at padding are
        finite, and nobody reads them.
        """
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i what `rows[i]` was: reorders, drops and duplicates rows of the batch."""
        ...

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` stored tokens of every row in every layer."""
        ...

    def reset(self) -> None:
        """Forget everything; the next call may bring another number of rows."""
        ...

    def report(self) -> Report:
        """What was stored, moved and attended so far."""
        ...

    def close(self) -> None:
        """Free memory and files. Closing twice is allowed."""
        ...


@runtime_checkable
class WantsNextQuery(Protocol):
    """An engine whose `attend` takes ``next_query=`` too, a guess of what the next layer will ask.

    It is [rows, query heads, 1, head_dim], and comes in decoding steps where there is one: not to
    the last layer, nor to the model's first.
    """

    @property
    def wants_next_query(self) -> bool:
        """Whether a guess is worth making."""
        ...
