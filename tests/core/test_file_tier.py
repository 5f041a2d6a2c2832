"""The tier of checksummed extents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.layout import BlockLayout
from tierstore.testing import TierTests
from tierstore.tiers.file import FileTier

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Tier

LAYOUT = BlockLayout.kv(8, 64, torch.bfloat16)


class TestFileTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> Tier:
        return FileTier(layout, folder / "tier", limit_bytes, extent_bytes=4096)
