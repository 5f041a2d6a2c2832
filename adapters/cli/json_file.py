"""Writing a JSON file whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tierstore.whole_file import replacing, unwritable

if TYPE_CHECKING:
    from pathlib import Path


def write_json(target: str | Path, content: object) -> None:
    """Replace `target`, or what it links to, by a file with `content`; ConfigError if it fails."""
    try:
        with replacing(target) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(target, "json", error) from error
