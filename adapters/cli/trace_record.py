"""``tierstore trace record``: run a model over a document and write an attention trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.cli.generate import (
    add_model_options,
    add_text_options,
    check_dtype,
    prepare_libraries,
)
from tierstore.adapters.documents import read_document
from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.sizes import MOST, parse_budget
from tierstore.whole_file import check_target, replacing, unwritable

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

_DESCRIPTION = """
Read a document, go on for some steps, and write which blocks each layer and KV head selected in
each step and what all blocks scored. Everything is in memory and a step attends to what it selects.
By default the model is fed the document's own continuation.
"""


def add_action(actions: Subparsers) -> None:
    """Add ``record`` to ``tierstore trace``."""
    parser = actions.add_parser(
        "record", help="run a model and write an attention trace", description=_DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="file to write")
    add_text_options(parser, steps=192)
    parser.add_argument(
        "--generate", action="store_true", help="feed the model its own likeliest tokens instead"
    )
    add_model_options(parser)
    parser.add_argument(
        "--preset", default="exact", help="whose index selects; default: %(default)s"
    )
    parser.add_argument("--block-tokens", type=int, metavar="N", help="the preset's by default")
    parser.add_argument(
        "--budget",
        help="share of the context (6.25%%) or number of tokens that a step selects",
    )


def run(options: argparse.Namespace) -> None:
    """Check what can be checked without a model, then record."""
    for name in ("tokens", "steps", "block_tokens"):
        value = getattr(options, name)
        if value is not None:
            check_whole(name, value, 1, MOST)
    if options.block_tokens is not None and options.block_tokens > options.tokens:
        raise ConfigError(
            f"block_tokens={options.block_tokens}: expected blocks that are shorter than the "
            f"context of {options.tokens} tokens"
        )
    check_dtype(options.dtype)
    if options.budget is not None:
        parse_budget(options.budget)
    check_target(options.trace, "trace")
    document = read_document(options.document)
    prepare_libraries()
    from tierstore.adapters.cli.recording import record

    trace = record(options, document)
    try:
        with replacing(options.trace) as unfinished:
            trace.save(unfinished)
    except OSError as error:
        raise unwritable(options.trace, "trace", error) from error
    size = Path(options.trace).stat().st_size
    print(f"{options.trace}: {trace.steps} steps of {trace.segments} segments, {size:,} bytes")
