"""Engine-neutral sparse attention over a block store."""

from tierstore.adapters.attention.engine import SparseAttention
from tierstore.adapters.attention.geometry import Geometry
from tierstore.adapters.attention.report import Report, TierReport

__all__ = ["Geometry", "Report", "SparseAttention", "TierReport"]
