"""``tierstore generate``: ask a model about a long document, its KV cache in tiers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierstore.adapters.cli.timeline import check_timeline
from tierstore.adapters.documents import read_document
from tierstore.arguments import check_whole
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.hysteresis import parse_hysteresis
from tierstore.sizes import MOST, check_window, parse_budget, parse_size_of
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

BUILTIN = "builtin"
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_DESCRIPTION = """
Answer a question about a document with keys and values on a disk, in DRAM and in a bounded fast
tier. The prompt is computed exactly; then each new token attends to the blocks that matter. Nothing
is downloaded, and what is stored is gone afterwards, but for --prefixes.
"""


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--model`` and ``--dtype``."""
    parser.add_argument(
        "--model",
        default="smollm2",
        metavar="smollm2|DIR|FILE.gguf",
        help="the demo model, a Hugging Face model directory or a GGUF file; default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"{', '.join(_DTYPES)}; default: %(default)s, bfloat16 where it is fast, else float32",
    )


def check_dtype(name: str) -> None:
    """ConfigError for what is no ``--dtype``."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r}: expected one of {', '.join(_DTYPES)}")


def add_text_options(parser: argparse._ActionsContainer, steps: int) -> None:
    """Add ``--document``, ``--tokens`` and ``--steps``: a text that a model reads and continues."""
    parser.add_argument("--document", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--tokens", type=int, default=4_096, metavar="N", help="context; default: %(default)s"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        metavar="N",
        help="tokens to decode; default: %(default)s",
    )


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
    add_model_options(model)
    model.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    _add_tier_options(parser)
    report = parser.add_argument_group("what to report")
    report.add_argument(
        "--compare",
        action="store_true",
        help="run full attention too; both then make all new tokens, past the end of the answer",
    )
    report.add_argument("--json", metavar="FILE", help="write everything to a file")
    report.add_argument(
        "--timeline",
        metavar="FILE",
        help="when each stage and each transfer ran: a .json for ui.perfetto.dev, or a picture "
        "(.png, .svg) of the last step's first layers",
    )


def _add_tier_options(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group("where keys and values live")
    tiers.add_argument(
        "--budget",
        help="share of the context (6.25%%) or number of tokens that a step selects",
    )
    tiers.add_argument(
        "--fast",
        metavar="SIZE",
        help="limit of the fast tier, for example 16MiB, or 12.5%% of the keys and values of all "
        "tokens: GPU memory, without a GPU ordinary memory",
    )
    tiers.add_argument("--dram", metavar="SIZE", help="limit of the DRAM tier, in the same way")
    tiers.add_argument(
        "--disk", metavar="DIR", help="directory of the disk tier, which then holds every block"
    )
    tiers.add_argument(
        "--disk-codec",
        metavar="NAME",
        help="how blocks are coded on disk, in checksummed extents that are read past the page "
        "cache: raw, int8, k8v4 or another; without it, a memory-mapped file",
    )
    tiers.add_argument(
        "--prefixes",
        metavar="DIR",
        help="keep computed prompts there, and load what this one begins like from there",
    )
    tiers.add_argument("--keep", action="store_true", help="leave the files in the disk tier")
    tiers.add_argument(
        "--preset", default="kvdrive", help="which system to be; default: %(default)s"
    )
    tiers.add_argument(
        "--window", type=float, metavar="X", help="capacity of the fast tier in budgets"
    )
    tiers.add_argument(
        "--plan",
        metavar="FILE",
        help="how window and budget are shared out between layers and heads; tierstore plan make "
        "writes one",
    )
    tiers.add_argument(
        "--recalibrate",
        type=int,
        metavar="STEPS",
        help="make the windows of heads anew once, after so many steps, from what these selected",
    )
    tiers.add_argument(
        "--hysteresis",
        metavar="NATS|SIZE",
        help="fetch a missing block only if it is so much better than the last one selected; or "
        "the bytes that a step should fetch, for example 512KiB, which the nats then follow",
    )


def run(options: argparse.Namespace) -> None:
    """Check what can be checked without a model, then ask one."""
    _check(options)
    document = None if options.document == BUILTIN else read_document(options.document)
    if options.question == BUILTIN:
        options.question = None
    prepare_libraries()
    from tierstore.adapters.cli.ask import ask

    ask(options, document)


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that no model could serve; nothing is left anywhere."""
    if options.question == BUILTIN and options.document != BUILTIN:
        raise ConfigError(
            f"question={BUILTIN!r}: only the built-in document has one; pass a question of your own"
        )
    check_whole("max_new_tokens", options.max_new_tokens, 1, MOST)
    check_dtype(options.dtype)
    _check_tiers(options)
    if options.json is not None:
        check_target(options.json, "json")
    if options.timeline is not None:
        check_timeline(options.timeline)


def _check_tiers(options: argparse.Namespace) -> None:
    if options.budget is not None:
        parse_budget(options.budget)
    for name in ("fast", "dram"):
        if getattr(options, name) is not None:
            # Of which size it is a share is known when the prompt is.
            parse_size_of(getattr(options, name), 1, name)
    if options.fast is None and options.dram is None:
        raise ConfigError("no memory tier: pass --fast, --dram or both, for example --dram 1GiB")
    if options.hysteresis is not None:
        parse_hysteresis(options.hysteresis)
    _check_window(options)
    if options.disk_codec is not None:
        from tierstore.codecs import check_codec_name

        check_codec_name(options.disk_codec)
    if options.prefixes is not None:
        from tierstore.adapters.attention.prefixes import Prefixes

        Prefixes(options.prefixes)
    if options.disk is not None:
        PrivateDirectory(options.disk).close()
    elif options.keep or options.disk_codec:
        raise ConfigError(
            "keep, disk codec: there is no disk tier; pass --disk, or leave out --keep and "
            "--disk-codec"
        )


def _check_window(options: argparse.Namespace) -> None:
    """What is said of the fast tier's window, which needs a fast tier, and to be shared another."""
    if options.window is not None:
        check_window(options.window)
    if options.recalibrate is not None:
        check_whole("recalibrate", options.recalibrate, 1, MOST)
    if options.plan is not None:
        from tierstore.policies.plan import Plan

        Plan.load(options.plan)
    if options.window is not None and options.fast is None:
        raise ConfigError("--window: there is no fast tier; pass --fast, or leave out --window")
    is_shared = options.plan is not None or options.recalibrate is not None
    has_backing = options.dram is not None or options.disk is not None
    if is_shared and not (options.fast is not None and has_backing):
        raise ConfigError(
            "--plan, --recalibrate: there is no fast tier to share out; pass --fast and another "
            "tier, or leave them out"
        )


def prepare_libraries() -> None:
    """Set what libraries read when they are imported, unless the user has."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
