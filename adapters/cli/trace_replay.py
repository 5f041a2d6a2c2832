"""What ``tierstore trace replay`` does, above all with a request trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tierstore.adapters.cli import attention_replay
from tierstore.adapters.cli.json_file import write_json
from tierstore.adapters.cli.pictures import new_figure, save_figure
from tierstore.adapters.cli.trace_file import read_attention
from tierstore.errors import ConfigError
from tierstore.policies.replay import POLICIES, Replay, footprint, replay
from tierstore.sizes import format_size, parse_budget
from tierstore.traces.attention import KIND
from tierstore.traces.file import kind_of
from tierstore.traces.readers import read_requests
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

    from tierstore.traces.requests import RequestTrace

_WIDTH = 110  # columns, where no terminal says how many there are
_CEILING = "belady"
_DEFAULT_CAPACITY = "1%,5%,10%"


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy did at one capacity.

    moved: bytes of misses, blocks where the trace has no sizes. share_of_belady: hits, in those of
    Belady at that capacity; None where that had none.
    """

    policy: str
    capacity: int
    hit_ratio: float
    prefix_hit_ratio: float
    moved: int
    share_of_belady: float | None


def run(options: argparse.Namespace) -> None:
    """Check the arguments; then replay and report."""
    is_attention = _kind(Path(options.trace)) == KIND
    check = attention_replay.checked_names if is_attention else _policies
    names = check(options.policies)
    if options.json is not None:
        check_target(options.json, "json")
    figure = None if options.plot is None else new_figure(8, 5, options.plot)
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    replay_kind = _replay_attention if is_attention else _replay_requests
    content = replay_kind(options, names, console, figure)
    if options.json is not None:
        write_json(options.json, content)


def _kind(path: Path) -> str | None:
    """What kind of trace is there; None for files of others, and what cannot be read."""
    try:
        return kind_of(path) if path.is_file() else None
    except OSError:
        return None


def _replay_attention(
    options: argparse.Namespace, names: list[str], console: Console, figure: Figure | None
) -> dict[str, object]:
    trace = read_attention(options.trace)
    if options.budget is not None:
        trace = trace.with_budget(parse_budget(options.budget))
    default = attention_replay.DEFAULT_CAPACITY
    capacity = default if options.capacity is None else options.capacity
    rows = attention_replay.rows_of(trace, names, capacity)
    attention_replay.show(trace, rows, console)
    if figure is not None:
        attention_replay.draw(figure, rows, options.plot)
    return attention_replay.content(trace, rows)


def _replay_requests(
    options: argparse.Namespace, names: list[str], console: Console, figure: Figure | None
) -> dict[str, object]:
    if options.budget is not None:
        raise ConfigError(
            "--budget: means nothing to a trace of requests, only to one of attention"
        )
    trace = read_requests(options.trace)
    if not len(trace.blocks):
        raise ConfigError(f"{options.trace}: expected requests for blocks, found none")
    capacity = _DEFAULT_CAPACITY if options.capacity is None else options.capacity
    capacities = [_capacity(text, trace) for text in capacity.split(",")]
    rows = [row for capacity in capacities for row in _rows(trace, names, capacity)]
    _print(trace, rows, console)
    if figure is not None:
        _draw(figure, rows, options.plot)
    return _content(trace, rows)


def _policies(text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policies={name!r}: expected all, or of {', '.join(POLICIES)}")
    return names


def _capacity(text: str, trace: RequestTrace) -> int:
    """A share of the footprint, or a number; at least 1."""
    try:
        if text.endswith("%"):
            return max(1, int(footprint(trace) * _share(text)))
        if int(text) > 0:
            return int(text)
    except ValueError:
        pass
    raise ConfigError(f"capacity={text!r}: expected a share such as 5%, or a number of at least 1")


def _share(text: str) -> float:
    share = float(text.removesuffix("%")) / 100
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


def _rows(trace: RequestTrace, policies: list[str], capacity: int) -> list[Row]:
    best = replay(trace, POLICIES[_CEILING](), capacity)
    return [
        _row(name, best if name == _CEILING else replay(trace, POLICIES[name](), capacity), best)
        for name in policies
    ]


def _row(name: str, result: Replay, best: Replay) -> Row:
    share = result.hit_ratio / best.hit_ratio if best.hit_ratio else None
    return Row(
        name, result.capacity, result.hit_ratio, result.prefix_hit_ratio, result.moved, share
    )


def _print(trace: RequestTrace, rows: list[Row], console: Console) -> None:
    console.print(
        f"{trace.requests:,} requests, {len(trace.blocks):,} accesses to {trace.distinct:,} blocks",
        soft_wrap=True,
    )
    moved = "blocks moved" if trace.sizes is None else "bytes moved"
    table = Table("capacity", "policy", "hits", "prefix hits", moved, "share of Belady")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            _amount(trace, row.capacity),
            row.policy,
            f"{row.hit_ratio:.2%}",
            f"{row.prefix_hit_ratio:.2%}",
            _amount(trace, row.moved),
            "–" if row.share_of_belady is None else f"{row.share_of_belady:.1%}",
        )
    console.print(table)


def _amount(trace: RequestTrace, value: int) -> str:
    return f"{value:,}" if trace.sizes is None else format_size(value)


def _content(trace: RequestTrace, rows: list[Row]) -> dict[str, object]:
    return {
        "schema": 1,
        "trace": {
            "requests": trace.requests,
            "accesses": len(trace.blocks),
            "distinct": trace.distinct,
            "unit": "blocks" if trace.sizes is None else "bytes",
            "facts": trace.facts,
        },
        "rows": [asdict(row) for row in rows],
    }


def _draw(figure: Figure, rows: list[Row], path: str) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row.policy for row in rows):
        mine = sorted((row.capacity, row.hit_ratio) for row in rows if row.policy == name)
        axes.plot(*zip(*mine, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="capacity", ylabel="hit ratio", xscale="log")
    axes.legend(fontsize="small", ncols=2)
    save_figure(figure, path)
