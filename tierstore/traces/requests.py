"""Request traces: which blocks each request used, from the root of its prefix chain to the leaf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tierstore.errors import TraceError
from tierstore.traces.file import read_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path

Hashes = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

KIND = "requests"

MOST_BYTES = 1 << 62
"""Bytes of all uses together: sums of sizes that a policy or a replay makes stay below 2**63."""


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Requests in the order of their arrival; TraceError if the arrays do not fit together.

    Attributes
    ----------
    request_ptr: int64 [requests + 1]; request r used ``blocks[request_ptr[r]:request_ptr[r + 1]]``.
    blocks: uint64 [n] prefix hashes, root first; equal hashes are the same block.
    sizes: int64 [n] > 0, bytes of each block of `blocks`, together at most 2**62; None where all
        are equal.
    timestamps: int64 [requests], milliseconds since some start; None if unknown.
    categories: int64 [requests], the kind or session of each request; None if unknown.
    costs: float64 [n] > 0, what bringing back each block of `blocks` costs, for instance computing
        it again; None where all are equal.
    facts: what else is known, for instance ``block_tokens``, as JSON can hold it.
    """

    request_ptr: Integers
    blocks: Hashes
    sizes: Integers | None = None
    timestamps: Integers | None = None
    categories: Integers | None = None
    costs: npt.NDArray[np.float64] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ptr = self.request_ptr
        _check("request_ptr", ptr, np.int64, None)
        _check("blocks", self.blocks, np.uint64, None)
        # Compared, not subtracted: a difference may overflow.
        rises = len(ptr) > 0 and bool((ptr[1:] >= ptr[:-1]).all())
        if not rises or ptr[0] != 0 or ptr[-1] != len(self.blocks):
            raise TraceError(
                "request_ptr: expected to rise from 0 to the number of blocks, "
                f"{len(self.blocks)}; found {ptr[:8].tolist()}..."
            )
        for name, (dtype, length) in _OPTIONAL.items():
            array = getattr(self, name)
            if array is not None:
                _check(name, array, dtype, len(self.blocks) if length == "n" else len(ptr) - 1)
        if self.sizes is not None:
            if self.sizes.min(initial=1) < 1:
                raise TraceError(f"sizes: expected bytes above 0, found {self.sizes.min()}")
            # As floats, whose sum does not wrap round.
            if self.sizes.sum(dtype=np.float64) > MOST_BYTES:
                raise TraceError(f"sizes: expected at most {MOST_BYTES} bytes in all, found more")
            self._check_equal_for_each_block("size", self.sizes)
        if self.costs is not None:
            wrong = self.costs[~(np.isfinite(self.costs) & (self.costs > 0))]
            if len(wrong):
                raise TraceError(f"costs: expected finite numbers above 0, found {wrong[0]}")
            self._check_equal_for_each_block("cost", self.costs)

    def _check_equal_for_each_block(self, name: str, values: npt.NDArray[Any]) -> None:
        expected = self.of_keys(values)[self.keys]
        changed = np.flatnonzero(expected != values)
        if len(changed):
            raise TraceError(
                f"{name}s: expected one {name} for each block, found {values[changed[0]]} at "
                f"position {changed[0]} and {expected[changed[0]]} elsewhere for the same block"
            )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.request_ptr) - 1

    @property
    def keys(self) -> npt.NDArray[np.int32]:
        """int32 [n]: the blocks, numbered from 0 in the order of their hashes."""
        return self._numbered[1]

    @property
    def distinct(self) -> int:
        """Number of different blocks: the footprint."""
        return len(self._numbered[0])

    def of_keys(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[distinct]: of values [n] that each block has, those of each key."""
        of_keys = np.empty(self.distinct, values.dtype)
        of_keys[self.keys] = values
        return of_keys

    @property
    def _numbered(self) -> tuple[Hashes, npt.NDArray[np.int32]]:
        cached: tuple[Hashes, npt.NDArray[np.int32]] | None = self.__dict__.get("_numbers")
        if cached is None:
            hashes, keys = np.unique(self.blocks, return_inverse=True)
            cached = hashes, keys.astype(np.int32)
            self.__dict__["_numbers"] = cached
        return cached

    @classmethod
    def of_blocks(cls, blocks: npt.ArrayLike, **facts: object) -> Self:
        """A trace in which each request uses one block; TraceError if hashes are no uint64 [n]."""
        hashes = _as_hashes(blocks)
        return cls(np.arange(hashes.size + 1), hashes, facts=facts)

    def save(self, path: str | Path) -> None:
        """Write the trace to a file; OSError of the file system passes through."""
        arrays = {"request_ptr": self.request_ptr, "blocks": self.blocks}
        given = {name: getattr(self, name) for name in _OPTIONAL}
        arrays.update({name: array for name, array in given.items() if array is not None})
        write_trace(path, KIND, self.facts, arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; TraceError for any other file."""
        facts, arrays = read_trace(path, KIND)
        known = {"request_ptr", "blocks", *_OPTIONAL}
        if not {"request_ptr", "blocks"} <= set(arrays) <= known:
            raise TraceError(
                f"{path}: expected arrays request_ptr, blocks and perhaps {', '.join(_OPTIONAL)}; "
                f"found {', '.join(sorted(arrays))}"
            )
        return cls(**arrays, facts=facts)


_OPTIONAL: dict[str, tuple[npt.DTypeLike, str]] = {
    "sizes": (np.int64, "n"),
    "timestamps": (np.int64, "requests"),
    "categories": (np.int64, "requests"),
    "costs": (np.float64, "n"),
}


def _as_hashes(blocks: npt.ArrayLike) -> Hashes:
    try:
        given = np.asarray(blocks)
        with np.errstate(invalid="ignore"):
            hashes: Hashes = np.asarray(blocks, np.uint64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"blocks: expected hashes from 0 to 2**64 - 1, found {error}") from error
    if given.dtype.kind not in "iuf" or not (given == hashes).all():
        raise TraceError(f"blocks: expected hashes from 0 to 2**64 - 1, found {given!r:.60}")
    return hashes


def _check(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, length: int | None) -> None:
    wanted = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise TraceError(f"{name}: expected {wanted} [n], found {type(array).__name__}")
    if array.dtype != wanted or array.ndim != 1 or length not in (None, len(array)):
        raise TraceError(
            f"{name}: expected {wanted} [{'n' if length is None else length}], found "
            f"{array.dtype} {list(array.shape)}"
        )
