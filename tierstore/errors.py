"""Every error the library raises on purpose, one class per way a caller can react.

A message names the subject, what was found, what was expected, and the way out.
"""

import errno


class TierstoreError(Exception):
    """Base of all errors raised by tierstore."""


class ConfigError(TierstoreError, ValueError):
    """The call is wrong: fix its arguments. Nothing was changed."""


class UnsupportedModelError(ConfigError):
    """The model, or the way it is used, cannot be served; the message says why."""


class CapacityError(TierstoreError, MemoryError):
    """The request does not fit into the configured limit, or everything in it is leased."""


class PolicyError(TierstoreError, RuntimeError):
    """A plug-in broke its contract: it raised, or named a block that is unknown or named twice."""


class StoreMismatchError(TierstoreError, ValueError):
    """The directory holds something other than what was asked for."""


class TraceError(TierstoreError, ValueError):
    """The file is not a trace that this version reads; the message says what it expected."""


class StoreLockedError(TierstoreError, BlockingIOError):
    """Another process has the directory; the message names it."""


class TierOfflineError(TierstoreError, OSError):
    """A tier failed and cannot serve."""


class TierFullError(CapacityError, OSError):
    """What a tier is on has no room left for a write that fits into the tier's own limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC


class CorruptBlockError(TierstoreError, OSError):
    """Stored bytes are damaged: they do not match their checksum, or no codec made them."""


class MissingExtraError(TierstoreError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: "
            f"run pip install 'tierstore[{extra}]'"
        )
