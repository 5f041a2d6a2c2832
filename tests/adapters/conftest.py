"""Settings of the adapter tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Waking a second thread takes longer than a tiny model's matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
