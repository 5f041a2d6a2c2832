"""What ``tierstore store`` does; apart from its options, since this takes a moment to import."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tierstore.adapters.cli.text import visible
from tierstore.errors import ConfigError, CorruptBlockError
from tierstore.identity import FORMAT_VERSION
from tierstore.sizes import format_size
from tierstore.volume import Finding
from tierstore.volume.format import CODECS
from tierstore.volume.inspect import facts_of, namespaces, open_volume, size_classes
from tierstore.volume.leftovers import remove_namespace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from tierstore.volume import Volume

_WIDTH = 110  # columns, where no terminal says how many there are


def stat(options: argparse.Namespace) -> int:
    """Print what each namespace holds."""
    facts = []
    for directory in namespaces(options.path):
        with closing(open_volume(directory)) as volume:
            facts.append(_facts(volume))
    if options.json:
        print(json.dumps({"schema": 1, "namespaces": facts}, indent=2))
        return 0
    for fact in facts:
        _print_facts(fact)
    return 0


def _facts(volume: Volume) -> dict[str, Any]:
    segments = volume.files.by_number.values()
    classes = size_classes(volume)
    return {
        "path": volume.directory,
        "format_version": FORMAT_VERSION,
        "identity": asdict(volume.identity),
        "epoch": volume.facts.epoch,
        "records": volume.records.live,
        "stored_bytes": sum(one.stored_bytes for one in classes),
        "disk_bytes": volume.disk_bytes,
        "segment_bytes": volume.facts.segment_bytes,
        "segments": len(segments),
        "blank_segments": sum(segment.is_blank for segment in segments),
        "size_classes": [asdict(one) | {"occupancy": one.occupancy} for one in classes],
    }


def _print_facts(facts: dict[str, Any]) -> None:
    identity = ", ".join(f"{name}={value!r}" for name, value in facts["identity"].items() if value)
    _print(facts["path"])
    _print(f"  identity: {identity}")
    _print(f"  format version {facts['format_version']}, epoch {facts['epoch']}")
    _print(
        f"  {facts['records']:,} records of {format_size(facts['stored_bytes'])} in "
        f"{format_size(facts['disk_bytes'])}: {facts['segments']:,} segment files of "
        f"{format_size(facts['segment_bytes'])}, {facts['blank_segments']:,} of them blank"
    )
    table = Table("extent", "segments", "extents", "records", "occupied", "evictable", "stored")
    for column in table.columns:
        column.justify = "right"
    for one in facts["size_classes"]:
        table.add_row(
            format_size(one["extent_bytes"]),
            *(f"{one[name]:,}" for name in ("segments", "extents", "records")),
            f"{one['occupancy']:.1%}",
            f"{one['evictable']:,}",
            format_size(one["stored_bytes"]),
        )
    if table.row_count:
        _console().print(table)


def ls(options: argparse.Namespace) -> int:
    """Print keys."""
    try:
        prefix = bytes.fromhex(options.prefix)
    except ValueError as error:
        raise ConfigError(
            f"prefix={options.prefix!r}: expected hexadecimal digits, two for each byte"
        ) from error
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"limit={options.limit}: expected at least 1")
    left = options.limit
    for directory in namespaces(options.path):
        with closing(open_volume(directory)) as volume:
            for line in _lines(volume, prefix, is_long=options.long):
                if left == 0:
                    return 0
                print(line)
                left = None if left is None else left - 1
    return 0


def _lines(volume: Volume, prefix: bytes, *, is_long: bool) -> Iterator[str]:
    records = volume.records
    for place in records.live_places().tolist():
        key = records.key(place)
        if not key.startswith(prefix):
            continue
        row = records.rows[place]
        code = int(row["codec"])
        codec = CODECS[code] if code < len(CODECS) else f"codec {code}"
        facts = f" {row['value_bytes']:>10} {row['stored_bytes']:>10} {row['sequence']:>10} {codec}"
        yield key.hex() + facts if is_long else key.hex()


def check(options: argparse.Namespace) -> int:
    """Check each namespace and print what is wrong with it."""
    found = [
        finding
        for directory in namespaces(options.path)
        for finding in _check_one(directory, fix=options.fix)
    ]
    damage = [finding for finding in found if finding.is_damage]
    is_fixed = all(finding.is_fixed for finding in damage)
    if damage and not is_fixed and not options.fix:
        _print(f"repair it, and drop what is damaged: tierstore store check --fix {options.path}")
    return 1 if damage else 0


def _check_one(directory: str, *, fix: bool) -> list[Finding]:
    try:
        facts_of(directory)
    except CorruptBlockError as error:
        findings = [Finding("identity", directory, -1, str(error), is_fixed=False)]
    else:
        with (
            closing(open_volume(directory, read_only=not fix)) as volume,
            _Bar(f"checking {os.path.basename(directory)}") as bar,
        ):
            findings = volume.check(fix=fix, progress=bar.show)
            records = volume.records.live
            stored_bytes = sum(one.stored_bytes for one in size_classes(volume))
    if findings:
        _print(f"{directory}: {len(findings):,} finding{'s' * (len(findings) > 1)}")
        _print_findings(directory, findings)
    else:
        _print(f"{directory}: {records:,} records, {format_size(stored_bytes)}: all is well")
    return findings


def _print_findings(directory: str, findings: list[Finding]) -> None:
    table = Table("kind", "file", "extent", "finding", "fixed")
    table.columns[2].justify = "right"
    for finding in findings:
        table.add_row(
            finding.kind,
            visible(os.path.relpath(finding.path, directory)),
            "" if finding.extent < 0 else str(finding.extent),
            visible(finding.message),
            "yes" if finding.is_fixed else "no",
        )
    _console().print(table)


def verify(options: argparse.Namespace) -> int:
    """Verify the payloads of each namespace."""
    code = 0
    for directory in namespaces(options.path):
        with (
            closing(open_volume(directory)) as volume,
            _Bar(f"verifying {os.path.basename(directory)}") as bar,
        ):
            begun = time.perf_counter()
            findings = volume.verify(bar.show)
            seconds = time.perf_counter() - begun
            records = volume.records.live
        _print(
            f"{directory}: {records:,} records, {format_size(bar.done)} in {seconds:.2f} s "
            f"({bar.done / 1e6 / seconds:,.0f} MB/s), {len(findings):,} damaged"
        )
        if findings:
            _print_findings(directory, findings)
            code = 1
    return code


def gc(options: argparse.Namespace) -> int:
    """Remove what is left over, or a whole namespace."""
    if options.namespace is not None:
        return _remove(options)
    if options.yes:
        raise ConfigError("yes: there is nothing to agree to; it goes with --namespace")
    for directory in namespaces(options.path):
        with closing(open_volume(directory, read_only=False)) as volume:
            left = volume.discard_leftovers()
        _print(
            f"{directory}: {left.segments:,} segment files "
            f"({format_size(left.segment_bytes)}) made empty, "
            f"{left.entries:,} entries and {left.files:,} unfinished files removed"
        )
    return 0


def _remove(options: argparse.Namespace) -> int:
    own = {os.path.basename(directory): directory for directory in namespaces(options.path)}
    directory = own.get(options.namespace)
    if directory is None:
        raise ConfigError(
            f"namespace={options.namespace!r}: expected one of {', '.join(map(repr, own))}"
        )
    if not options.yes:
        raise ConfigError(f"{directory!r} would be removed with all its values: add --yes")
    remove_namespace(directory)
    _print(f"{directory}: removed")
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "stat": stat,
    "ls": ls,
    "check": check,
    "verify": verify,
    "gc": gc,
}


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _print(line: str) -> None:
    print(visible(line))


class _Bar:
    """Bytes done, on a terminal, on standard error."""

    def __init__(self, task: str) -> None:
        self.done = 0
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(visible(task), total=None)

    def show(self, done: int, total: int) -> None:
        """Say how far it has come."""
        self.done = done
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
