"""The part of ``tierstore capture`` that needs a model, and so takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.capture import capture
from tierstore.adapters.cli.screen import waiting
from tierstore.adapters.documents import beginning
from tierstore.adapters.models import load_model, named_dtype

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.documents import Document
    from tierstore.traces.capture import Capture


def capture_document(options: argparse.Namespace, document: Document) -> Capture:
    """Capture as `options` say."""
    with waiting(f"loading {options.model}"):
        loaded = load_model(options.model, named_dtype(options.dtype))
    text = beginning(loaded.tokenizer, document.text, options.tokens + options.steps)
    with waiting(f"reading {options.tokens:,} tokens and {options.steps} steps"):
        return capture(
            loaded.model,
            text,
            options.steps,
            window=options.window,
            with_hidden=options.hidden,
            limit=options.limit,
            name=loaded.name,
            document=Path(options.document).name,
        )
