"""The `tierstore` command.

Any package can add a command through the entry-point group ``tierstore.commands``: an entry point
is a function ``add_command(subparsers)`` that adds a parser to argparse's `subparsers` and gives it
a default ``run``, a function that takes the parsed arguments and returns an exit code, None for 0.
Errors of the family `TierstoreError` that `run` raises become one line on standard error and exit
code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

from tierstore.adapters.cli import capture, generate, plan, profile, roofline, store, trace
from tierstore.errors import ConfigError, TierstoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_COMMANDS = "tierstore.commands"
_BAD_INPUT = 2
_DIED_OF = 128  # plus the signal's number, as shells count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments`, or the process's own, name; returns its exit code."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _exit)
    try:
        options = _parser().parse_args(arguments)
        code: int | None = options.run(options)
        sys.stdout.flush()
    except TierstoreError as error:
        print("tierstore: error:", " ".join(str(error).split()), file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _DIED_OF + signal.SIGINT
    except BrokenPipeError:
        # What is still buffered would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DIED_OF + signal.SIGPIPE
    return code or 0


def _exit(signal_number: int, frame: FrameType | None) -> NoReturn:
    """End by an exception, so that whatever is open is closed and removed."""
    sys.exit(_DIED_OF + signal_number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    summary = metadata.metadata("tierstore")["Summary"]
    parser: argparse.ArgumentParser = _Parser(prog="tierstore", description=summary)
    parser.add_argument(
        "--version", action="version", version=f"tierstore {metadata.version('tierstore')}"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="command", required=True)
    generate.add_command(subparsers)
    store.add_command(subparsers)
    plan.add_command(subparsers)
    roofline.add_command(subparsers)
    profile.add_command(subparsers)
    trace.add_command(subparsers)
    capture.add_command(subparsers)
    for point in sorted(metadata.entry_points(group=_COMMANDS), key=lambda point: point.name):
        _add_contributed(subparsers, point)
    return parser


def _add_contributed(subparsers: Subparsers, point: metadata.EntryPoint) -> None:
    try:
        point.load()(subparsers)
    # Another package's fault, whatever it is, must not take the other commands away.
    except Exception as error:
        reason = f"command {point.name!r}: {point.value} cannot be loaded ({error}); reinstall it"

        def refuse(options: argparse.Namespace) -> NoReturn:
            raise ConfigError(reason)

        subparsers.add_parser(point.name, help="(cannot be loaded)").set_defaults(run=refuse)
