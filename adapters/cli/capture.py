"""``tierstore capture``: run a model over a document and keep what its attention saw."""

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
from tierstore.sizes import MOST, format_size, parse_size
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

_DESCRIPTION = """
Read a document with full attention, go on for some steps with its own continuation, and write the
keys, values and queries of every layer to a file, on which tierstore bench index --captures
compares indexes. The file is an .npz archive that NumPy reads.
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``capture`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "capture", help="write keys and queries of a model to a file", description=_DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("file", metavar="FILE", help="file to write")
    add_text_options(parser, steps=64)
    parser.add_argument(
        "--window",
        type=int,
        default=64,
        metavar="N",
        help="queries of the context's end to keep; default: %(default)s",
    )
    parser.add_argument(
        "--hidden", action="store_true", help="keep also what goes into each layer at each step"
    )
    parser.add_argument(
        "--limit", default="2GiB", metavar="SIZE", help="most bytes to keep; default: %(default)s"
    )
    add_model_options(parser)


def run(options: argparse.Namespace) -> None:
    """Check what can be checked without a model, then capture."""
    for name in ("tokens", "steps", "window"):
        check_whole(name, getattr(options, name), 1, MOST)
    check_dtype(options.dtype)
    parse_size(options.limit, "limit")
    check_target(options.file, "file")
    document = read_document(options.document)
    prepare_libraries()
    from tierstore.adapters.cli.capturing import capture_document

    found = capture_document(options, document)
    path = Path(options.file)
    found.save(path)
    print(
        f"{path}: {found.prompt_tokens:,} tokens and {found.steps} steps of "
        f"{len(found.keys)} layers, {format_size(path.stat().st_size)}"
    )
