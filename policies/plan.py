"""A plan: how one model's budget and fast tier are shared out between its layers and heads."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from tierstore.errors import ConfigError
from tierstore.policies.windows import WINDOWS
from tierstore.sizes import MOST
from tierstore.whole_file import replacing

if TYPE_CHECKING:
    from tierstore.policies.profile import Amounts

FORMAT = "tierstore-plan"
VERSION = 2
READS = (1, 2)
"""Versions of files that can be read; those of version 1 have neither `pinned` nor `tuning`."""

LEAST = 1 / 64
"""Smallest budget of a head, in mean ones."""

_LARGEST = 1e9


@dataclass(frozen=True)
class Tuning:
    """Settings that were the fastest of those tried on one machine; None where none was.

    tokens_per_centroid: context tokens for each centroid of an index of clusters.
    micro_batch: sequences that are selected for, judged and fetched together.

    ConfigError for anything else.
    """

    tokens_per_centroid: float | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        fault = _fault_of_tuning(asdict(self))
        if fault:
            raise ConfigError(f"plan: {fault}")


@dataclass(frozen=True, eq=False)
class Plan:
    """Windows and budgets of every layer and KV head of a model.

    Attributes
    ----------
    windows: float64 [layers, KV heads], capacity in the fast tier, in mean budgets.
    budgets: float64 [layers, KV heads], budget in mean budgets, their mean at most 1 and none above
        its window; None where all are alike.
    misses: float64 [layers, KV heads, windows], what each head missed in a step with the windows
        `WINDOWS` of its own budget, in mean budgets; None if not known. A recalibration blends it
        with what it sees.
    query_heads, head_dim: of the model, to tell it from another.
    facts: how the plan came about, as far as JSON can hold it.
    pinned: float64 [layers, KV heads], blocks of the tier under the fast one to keep in
        page-locked memory, in mean budgets; None where all share it.
    tuning: other settings.

    ConfigError for anything else.
    """

    windows: Amounts
    query_heads: int
    head_dim: int
    budgets: Amounts | None = None
    misses: Amounts | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    pinned: Amounts | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        fault = (
            _fault_of_model(self.query_heads, self.head_dim, self.facts)
            or _fault_of_types(self.windows, self.budgets, self.misses, self.pinned)
            or _fault(self.windows, self.budgets, self.misses)
            or _fault_of_pinned(self.windows, self.pinned)
        )
        if fault:
            raise ConfigError(f"plan: {fault}")

    @property
    def window(self) -> float:
        """Mean of the windows."""
        return float(self.windows.mean())

    @property
    def shares(self) -> Amounts:
        """The budgets, also where all are alike."""
        return np.ones_like(self.windows) if self.budgets is None else self.budgets

    def check_model(self, layers: int, kv_heads: int, query_heads: int, head_dim: int) -> None:
        """ConfigError unless the plan is for a model of these sizes."""
        own = (*self.windows.shape, self.query_heads, self.head_dim)
        if own != (layers, kv_heads, query_heads, head_dim):
            raise ConfigError(
                f"plan of {self.facts.get('model', 'another model')!r} with {_sizes(*own)}: "
                f"expected one of a model with {_sizes(layers, kv_heads, query_heads, head_dim)}; "
                "make it with tierstore plan make"
            )

    def to_dict(self) -> dict[str, object]:
        """Plain data, as in a file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "query_heads": self.query_heads,
            "head_dim": self.head_dim,
            "windows": self.windows.tolist(),
            "budgets": None if self.budgets is None else self.budgets.tolist(),
            "misses": None if self.misses is None else self.misses.tolist(),
            "pinned": None if self.pinned is None else self.pinned.tolist(),
            "tuning": None if self.tuning is None else asdict(self.tuning),
            "facts": dict(self.facts),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all. OSError passes through."""
        with replacing(path) as unfinished:
            unfinished.write_text(
                json.dumps(self.to_dict(), allow_nan=False) + "\n", encoding="utf-8"
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan. ConfigError if the file cannot be read or is not one."""
        try:
            content = json.loads(Path(path).read_bytes(), parse_constant=_refuse)
        except OSError as error:
            raise ConfigError(
                f"plan={str(path)!r}: {error.strerror}; pass a file that tierstore plan make wrote"
            ) from error
        except (ValueError, RecursionError) as error:
            raise _bad(path, f"no JSON ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _bad(path, "JSON of another kind")
        version = content.get("version")
        if type(version) is not int or version not in READS:
            raise _bad(path, f"version {version!r}: this tierstore reads versions 1 and 2")
        model: list[Any] = [content.get(name) for name in ("query_heads", "head_dim", "facts")]
        query_heads, head_dim, facts = model
        fault = _fault_of_model(query_heads, head_dim, facts)
        if fault:
            raise _bad(path, fault)
        try:
            windows = _table(content.get("windows"))
            budgets, misses, pinned = (
                None if content.get(name) is None else _table(content[name])
                for name in ("budgets", "misses", "pinned")
            )
        except ValueError as error:
            raise _bad(path, "a table that is not one of numbers, layer by layer") from error
        tuning = content.get("tuning")
        fault = (
            _fault(windows, budgets, misses)
            or _fault_of_pinned(windows, pinned)
            or _fault_of_tuning(tuning)
        )
        if fault:
            raise _bad(path, fault)
        settings = None if tuning is None else Tuning(**tuning)
        return cls(windows, query_heads, head_dim, budgets, misses, facts, pinned, settings)


def _fault_of_model(query_heads: object, head_dim: object, facts: object) -> str:
    """What is wrong with a plan besides its tables; empty if nothing."""
    for name, value in (("query_heads", query_heads), ("head_dim", head_dim)):
        if type(value) is not int or not 1 <= value <= MOST:
            return f"{name}={reprlib.repr(value)}: expected a whole number from 1 to {MOST}"
    if not isinstance(facts, Mapping):
        return f"facts={reprlib.repr(facts)}: expected them by name"
    try:
        json.dumps(dict(facts), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"facts that JSON cannot hold ({error})"
    return ""


def _fault_of_types(*tables: object) -> str:
    for table in tables:
        is_numbers = isinstance(table, np.ndarray) and table.dtype.kind in "iuf"
        if table is not None and not is_numbers:
            return f"a table {reprlib.repr(table)}: expected an array of numbers"
    return ""


def _fault(windows: Amounts, budgets: Amounts | None, misses: Amounts | None) -> str:
    """What is wrong with the tables of a plan; empty if nothing."""
    if windows.ndim != 2 or not windows.size:
        return f"windows of shape {windows.shape}: expected [layers, KV heads]"
    if budgets is not None and budgets.shape != windows.shape:
        return f"budgets of shape {budgets.shape}, windows of {windows.shape}: expected the same"
    shares = np.ones_like(windows) if budgets is None else budgets
    if not (np.isfinite(windows).all() and np.isfinite(shares).all() and shares.min() >= LEAST):
        return f"windows and budgets: expected finite numbers, and none below {LEAST}"
    if shares.mean() > 1 + 1e-9:
        return f"budgets of {shares.mean():.3f} in the mean: expected at most 1"
    if (windows < shares - 1e-9).any():
        return "a window smaller than its head's budget: expected at least as much"
    shape = (*windows.shape, len(WINDOWS))
    if misses is not None and (
        misses.shape != shape or not np.isfinite(misses).all() or misses.min() < 0
    ):
        return f"misses of shape {misses.shape}: expected numbers >= 0, {shape}"
    return ""


def _fault_of_pinned(windows: Amounts, pinned: Amounts | None) -> str:
    if pinned is not None and (
        pinned.shape != windows.shape or not np.isfinite(pinned).all() or pinned.min() < 0
    ):
        return f"pinned of shape {pinned.shape}: expected numbers >= 0, {windows.shape}"
    return ""


def _fault_of_tuning(tuning: object) -> str:
    """What is wrong with settings by name; empty if nothing."""
    if tuning is None:
        return ""
    if not isinstance(tuning, dict) or not tuning.keys() <= {"tokens_per_centroid", "micro_batch"}:
        return f"tuning={reprlib.repr(tuning)}: expected tokens_per_centroid and micro_batch"
    tokens, micro_batch = tuning.get("tokens_per_centroid"), tuning.get("micro_batch")
    if tokens is not None and (type(tokens) not in (int, float) or not 1 <= tokens <= MOST):
        return f"tokens_per_centroid={reprlib.repr(tokens)}: expected a number from 1 to {MOST}"
    if micro_batch is not None and (type(micro_batch) is not int or not 1 <= micro_batch <= MOST):
        return f"micro_batch={reprlib.repr(micro_batch)}: expected a whole number from 1 to {MOST}"
    return ""


def _table(content: object) -> Amounts:
    """Nested lists of numbers as an array; ValueError for anything else."""
    cells: list[Any] = [content]
    while cells and isinstance(cells[0], list):
        if not all(isinstance(row, list) for row in cells):
            raise ValueError
        cells = [cell for row in cells for cell in row]
    if any(type(cell) not in (int, float) or not abs(cell) <= _LARGEST for cell in cells):
        raise ValueError
    return np.array(content, np.float64)


def _refuse(constant: str) -> NoReturn:
    """NaN and infinities, which Python's JSON has and no other."""
    raise ValueError(f"{constant} is no number")


def _bad(path: str | Path, found: str) -> ConfigError:
    return ConfigError(f"plan={str(path)!r}: expected a plan that tierstore wrote, found {found}")


def _sizes(layers: int, kv_heads: int, query_heads: int, head_dim: int) -> str:
    return (
        f"{layers} layers, {kv_heads} KV heads, {query_heads} query heads and head dimension "
        f"{head_dim}"
    )
