"""Settings of the benchmark tests: everything tiny."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import llama

from tierstore.adapters.models import LoadedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.adapters.models import LanguageModel


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    model = llama(vocab_size=256, max_position_embeddings=4096)
    return LoadedModel(cast("LanguageModel", model), byte_tokenizer(), "tiny")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Waking a second thread takes longer than a tiny model's matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
