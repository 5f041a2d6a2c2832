"""Hugging Face models on tierstore: keys and values live in tiers, attention is sparse.

Only public extension points are used: a cache, a registered attention and mask function, and
forward hooks on the decoder. For transformers 5.19 and later.
"""

from tierstore.errors import MissingExtraError

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "transformers", extra="transformers", purpose="the adapter for Hugging Face models"
    ) from error

from tierstore.adapters.transformers.attach import attach, attach_engine
from tierstore.adapters.transformers.cache import TierCache
from tierstore.adapters.transformers.engine import AttentionEngine
from tierstore.adapters.transformers.profile import geometry_of

__all__ = ["AttentionEngine", "TierCache", "attach", "attach_engine", "geometry_of"]
