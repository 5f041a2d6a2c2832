"""Settings of the adapter tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tierstore.adapters.models import LoadedModel, load_model
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The real model of the demo, loaded once: that takes seconds."""
    try:
        return load_model("smollm2", torch.bfloat16, "cpu")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_fp32() -> LoadedModel:
    """The demo model in float32, where rounding cannot hide a wrong token."""
    try:
        return load_model("smollm2", torch.float32, "cpu")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Waking a second thread takes longer than a tiny model's matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
