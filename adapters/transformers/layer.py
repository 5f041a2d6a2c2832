"""A layer of a transformers cache whose keys and values live in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    import torch

    from tierstore.adapters.transformers.session import Session


class HeldLayer(CacheLayerMixin):
    """Hands new keys and values on to the attention call, which gives them to the engine.

    Transformers updates a cache before it attends, but which blocks to read depends on the query.
    So `update` stores nothing.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, session: Session, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session
        self._number = number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Output of the layer, [rows, tokens, query heads, head_dim]."""
        return self._session.attend(self._number, query, key, value, scale)

    def get_seq_length(self) -> int:
        return self._session.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._session.length + query_length, 0

    def get_max_length(self) -> int:
        return -1
