"""What the library logs, as events with fields; docs/store.md lists them.

Records go to loggers below ``tierstore`` and say nothing unless the application configures logging.
``event`` and the fields are attributes of the log record, for formatters that write them all.
"""

from __future__ import annotations

import logging

logging.getLogger("tierstore").addHandler(logging.NullHandler())


def emit(logger: logging.Logger, level: int, event: str, message: str, **fields: object) -> None:
    """Log `message`, with `event` and `fields` as attributes of the record."""
    logger.log(level, message, extra={"event": event, **fields})
