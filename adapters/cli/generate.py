"""``tierstore generate``: ask a model about a long document, its KV cache in tiers."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tierstore.adapters.cli.record import check_target, record_of, write_record
from tierstore.adapters.documents import Document, build_prompt, builtin_document, read_document
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.sizes import parse_budget, parse_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tierstore.adapters.cli import Subparsers
    from tierstore.adapters.models import LoadedModel

BUILTIN = "builtin"
DTYPES = ("bfloat16", "float16", "float32")
_DESCRIPTION = """
Answer a question about a document with keys and values on a disk, in DRAM and in a bounded fast
tier. The prompt is computed exactly; then each new token attends to the blocks that matter. Nothing
is downloaded, and what is stored is gone afterwards.
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``generate`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "generate",
        help="ask a model about a long document, its KV cache in tiers",
        description=_DESCRIPTION,
    )
    parser.set_defaults(run=run)
    text = parser.add_argument_group("what to ask")
    text.add_argument(
        "--document",
        required=True,
        metavar="FILE|builtin",
        help="UTF-8 text; builtin: 6,000 tokens of English with a fact in the middle",
    )
    text.add_argument(
        "--question",
        required=True,
        metavar="TEXT|builtin",
        help="may be empty; builtin: the question about that fact",
    )
    text.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s"
    )
    model = parser.add_argument_group("which model")
    model.add_argument(
        "--model",
        default="smollm2",
        metavar="smollm2|DIR|FILE.gguf",
        help="the demo model, a Hugging Face model directory or a GGUF file; default: %(default)s",
    )
    model.add_argument(
        "--dtype", default="bfloat16", help=f"{', '.join(DTYPES)}; default: %(default)s"
    )
    model.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    tiers = parser.add_argument_group("where keys and values live")
    tiers.add_argument(
        "--budget",
        help="share of the context (6.25%%) or number of tokens that a step selects",
    )
    tiers.add_argument(
        "--fast",
        metavar="SIZE",
        help="limit of the fast tier, for example 16MiB: GPU memory, without a GPU ordinary memory",
    )
    tiers.add_argument("--dram", metavar="SIZE", help="limit of the DRAM tier")
    tiers.add_argument(
        "--disk", metavar="DIR", help="directory of the disk tier; made if only it is missing"
    )
    tiers.add_argument("--keep", action="store_true", help="leave the files in the disk tier")
    tiers.add_argument(
        "--preset", default="kvdrive", help="which system to be; default: %(default)s"
    )
    tiers.add_argument(
        "--window", type=float, metavar="X", help="capacity of the fast tier in budgets"
    )
    report = parser.add_argument_group("what to report")
    report.add_argument(
        "--compare",
        action="store_true",
        help="run full attention too; both then make all new tokens, past the end of the answer",
    )
    report.add_argument("--json", metavar="FILE", help="write everything to a file")


def run(arguments: argparse.Namespace) -> None:
    """Check the arguments, cheapest first; then load the model, generate, and report."""
    _check(arguments)
    document = None if arguments.document == BUILTIN else read_document(arguments.document)
    _prepare_environment()

    import torch

    from tierstore.adapters.cli.screen import Screen, waiting
    from tierstore.adapters.generate import TierOptions, check_length, compare, end_tokens, generate
    from tierstore.adapters.models import load_model
    from tierstore.adapters.presets import preset_named

    preset_named(arguments.preset)
    with waiting(f"loading {arguments.model}"):
        loaded = load_model(
            arguments.model, getattr(torch, arguments.dtype), torch_device(arguments.device)
        )
    document = _with_question(document or builtin_document(loaded.tokenizer), arguments.question)
    prompt = build_prompt(
        loaded.tokenizer, document.text, document.question, document.begun_answer
    )
    tiers = TierOptions(
        arguments.preset,
        arguments.budget,
        arguments.fast,
        arguments.dram,
        arguments.disk,
        arguments.keep,
        arguments.window,
    )
    ...
