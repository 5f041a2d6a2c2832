"""Hugging Face models on tierstore: keys and values live in tiers, attention is sparse.

Models are hooked up through public extension points: a cache, a registered attention and mask
function, and forward hooks on the decoder. Two private attributes are read, none is written:
`_attn_implementation` of the configuration and `_supports_attention_backend` of the model.
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
from tierstore.adapters.transformers.continuous import ContinuousBatch, Finished
from tierstore.adapters.transformers.engine import AttentionEngine
from tierstore.adapters.transformers.profile import geometry_of

__all__ = [
    "AttentionEngine",
    "ContinuousBatch",
    "Finished",
    "TierCache",
    "attach",
    "attach_engine",
    "geometry_of",
]
