"""A disk tier of coded extents behind an attached model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import llama, random_ids

from tierstore.adapters.transformers import attach
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def next_logits(folder: Path, codec: str | None) -> torch.Tensor:
    """Logits after a prompt of 300 tokens whose blocks are mostly on disk only."""
    model = llama()
    with attach(model, preset="full", dram="160KiB", disk=folder, disk_codec=codec) as cache:
        ids = random_ids(1, 300)
        model(ids, **cache.kwargs, use_cache=True)
        logits: torch.Tensor = model(ids[:, :1], **cache.kwargs, use_cache=True).logits
        disk = cache.report().tiers[-1]
        assert disk.bytes_read > 0, "nothing came from disk"
        assert codec is None or codec in disk.medium
    return logits


@torch.no_grad()
def test_lossless_codecs_change_nothing(tmp_path: Path) -> None:
    expected = next_logits(tmp_path, None)
    for codec in ("raw", "shuffle+zstd"):
        assert torch.equal(next_logits(tmp_path, codec), expected), codec
    assert not list(tmp_path.iterdir()), "files are left"


@torch.no_grad()
def test_lossy_codecs_change_little(tmp_path: Path) -> None:
    expected = next_logits(tmp_path, None)
    for codec, most in (("int8", 0.02), ("k8v4", 0.2)):
        difference = (next_logits(tmp_path, codec) - expected).abs().max()
        assert 0 < difference <= most * expected.abs().max(), codec


@pytest.mark.parametrize(
    ("codec", "disk", "message"),
    [("int8", None, "no disk tier"), ("int5", ".", "'int5' is unknown")],
)
def test_what_cannot_be_is_refused(codec: str, disk: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(llama(), dram="1MiB", disk=disk, disk_codec=codec)
