"""What users replace: where blocks live, who leaves, what is critical, how bytes are coded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from _typeshed import ReadableBuffer

    from tierstore.directory import HandleSpace
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout
    from tierstore.memory import Memory
    from tierstore.scratch import Scratch

Ids = npt.NDArray[np.int32]
Pointers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Completion(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the bytes have arrived; raise what went wrong."""


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


DONE: Completion = _Done()
"""What a tier returns when the transfer finished before the call did."""


class Tier(ABC):
    """Holds blocks at integer slots; knows nothing about which block is where.

    Several threads may read at once; the store serialises writes, `resize` and `close` against all
    else. Until a transfer's completion has been waited for, its buffers and slots belong to the
    tier; afterwards, also with an error, the tier no longer touches the buffers.
    """

    name: str
    layout: BlockLayout

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Slots the tier has now."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """Slots it could have at most, as things stand."""

    @abstractmethod
    def resize(self, slots: int) -> None:
        """Have `slots` slots, keeping what those hold. CapacityError if they do not fit."""

    @abstractmethod
    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        """Copy block ``slots[i]`` to ``out[rows[i]]``, [., block_bytes]; only `parts` if given.

        Requires: slots below `capacity`; `rows` distinct. A slot never written reads as any bytes.
        """

    @abstractmethod
    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        """Copy ``blocks[rows[i]]`` into slot ``slots[i]``; only `parts` if given.

        Requires: `slots` distinct. Errors of the medium are OSError; slots written are then
            undefined.
        """

    def expect(self, slots: Ids) -> None:  # noqa: B027 (a tier may have no way)
        """These may be read soon: begin to bring them nearer, if that goes on by itself."""

    @abstractmethod
    def sync(self) -> None:
        """Return when everything written survives a power loss; does nothing if volatile."""

    @abstractmethod
    def close(self) -> None:
        """Give up resources; a second call does nothing."""

    @property
    def medium(self) -> str:
        """What the tier really is on this machine, for reports."""
        return "memory"

    @property
    def is_lossless(self) -> bool:
        """Whether blocks come back byte for byte."""
        return True

    @property
    def is_addressable(self) -> bool:
        """Whether kernels may read `view` in place."""
        return False

    @property
    def view(self) -> Bytes:
        """All slots of an addressable tier, [capacity, block_bytes]; valid until `resize`."""
        raise ConfigError(f"tier {self.name!r} cannot be read in place: use read()")

    @property
    def memory(self) -> Memory | None:
        """The limit that the tier's slots share with other data; None outside memory."""
        return None

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier occupies on its medium, as far as its limit covers them."""
        return self.capacity * self.layout.block_bytes


class RecordTier(ABC):
    """Holds records, that is, values under keys, where several machines find them.

    It promises nothing about how long: a record may vanish at any time, and is never served
    damaged. Keys have 1 to 511 bytes. Any thread may call; all errors of the network are OSError.
    """

    name: str
    max_value_bytes: int
    """Bytes of the longest value it takes."""
    damaged: int
    """Values that were not handed out, since their bytes are not what was written."""
    refused: int
    """Values that were not taken: too long, or no room."""

    @property
    @abstractmethod
    def medium(self) -> str:
        """What the tier really is, for reports."""

    @abstractmethod
    def read(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bytes | None]:
        """The value of each key; None if there is none or it is damaged.

        TierOfflineError if the tier does not answer, at the latest after `deadline` seconds.
        """

    @abstractmethod
    def write(
        self, keys: Sequence[bytes], values: Sequence[ReadableBuffer]
    ) -> npt.NDArray[np.bool_]:
        """Put ``values[i]`` under ``keys[i]``, the last one of equal keys; False where refused.

        TierOfflineError if the tier does not answer; each record is then the old or the new one,
        and may still become the new one.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Take records away; whether each was there."""

    @abstractmethod
    def clear(self) -> None:
        """Take away every record of the namespace, for all machines.

        TierOfflineError if the tier does not answer; some may then be left.
        """

    @abstractmethod
    def contains(
        self, keys: Sequence[bytes], deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Whether there is something under each key, which may still turn out to be damaged."""

    @abstractmethod
    def close(self) -> None:
        """Give up resources, not records; a second call does nothing."""


@dataclass(slots=True, eq=False)
class BlockScores:
    """What an index thought of every block in one step, kept per unit and looked up when needed.

    unit_scores: float32 [R, units] log attention mass, among all tokens. unit_of: int32 or int16
    [R, blocks], or [1, blocks] for all rows; -1 unknown. It may be wider than a row has blocks.
    segments: int32 [R], the segment of each row.
    """

    unit_scores: Scores
    unit_of: Ids
    segments: Ids


@dataclass(slots=True, eq=False)
class Selection:
    """What an index answers: for row r, ids ``row_ptr[r]:row_ptr[r + 1]`` with their scores.

    everything: scores of all blocks, for policies; None if the index has none.
    """

    row_ptr: Pointers
    ids: Ids
    scores: Scores
    everything: BlockScores | None = None


@dataclass(slots=True, eq=False)
class Access:
    """One step's selected blocks, after judging.

    handles, scores: int32 and float32 [n], the blocks of row r at ``row_ptr[r]:row_ptr[r + 1]``.
    step: a number that grows by one with each access.
    """

    row_ptr: Pointers
    handles: Ids
    scores: Scores
    step: int
    everything: BlockScores | None = None


def _no_handles() -> Ids:
    return np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Demand:
    """Room wanted in domains: from residents ``row_ptr[i]:row_ptr[i + 1]`` choose ``need[i]``.

    eligible: False for a block that is leased or used by the running step. access: the running
        step. incoming: the blocks that are about to come in, as far as they are known.
    """

    domains: Ids
    row_ptr: Pointers
    residents: Ids
    eligible: npt.NDArray[np.bool_]
    need: Pointers
    access: Access
    incoming: Ids = field(default_factory=_no_handles)


class EvictionPolicy(ABC):
    """Decides who leaves. Knows block handles, scores and time; never bytes, slots, tiers or locks.

    A handle names one block for as long as its segment lives; residency comes and goes meanwhile.
    The store calls from one thread at a time.
    """

    def bind(self, space: HandleSpace) -> None:  # noqa: B027 (a policy may need no memory)
        """Called once before anything else: take per-handle memory with ``space.column``."""

    def on_capacity(self, domains: Ids, blocks: Pointers) -> None:  # noqa: B027 (need not care)
        """Each of `domains` may hold so many blocks from now on."""

    @abstractmethod
    def on_access(self, access: Access) -> None:
        """Blocks were selected, whether they were resident or not."""

    def on_admit(self, handles: Ids, domains: Ids) -> None:  # noqa: B027 (need not care)
        """Blocks came in; ``domains[i]`` is that of ``handles[i]``."""

    def on_evict(self, handles: Ids) -> None:  # noqa: B027 (need not care)
        """Blocks left the tier, victims or others; they may come back."""

    @abstractmethod
    def victims(self, demand: Demand) -> Ids:
        """Handles to evict: exactly ``need[i]`` eligible residents of each domain, in domain order.

        Pure: the store may evict fewer. PolicyError if a domain has too few eligible residents.
        """

    @abstractmethod
    def on_remove(self, handles: Ids) -> None:
        """The blocks are gone for good. Their handles may come back as other blocks."""

    def on_close(self, segments: Ids, domains: Ids) -> None:  # noqa: B027 (need not care)
        """Empty segments are gone, and domains without one; the numbers may come back as others."""


@dataclass(frozen=True)
class IndexContext:
    """What some indexes need beside keys; absent pieces are None.

    first_block: number of the first block of these keys in its segment.
    last_queries: [R, G, w, d] queries of the last w prompt tokens.
    """

    first_block: int = 0
    last_queries: torch.Tensor | None = None


class Index(ABC):
    """Finds the critical blocks of each row (sequence x KV head) for its queries.

    Rows are numbered from 0 in the order given to `add_rows`. The engine calls from one thread.
    """

    @property
    def gives_scores(self) -> bool:
        """Whether the scores of what it selects tell better blocks from worse; hysteresis asks."""
        return True

    @property
    def refresh_tokens(self) -> int:
        """Tokens that should gather before they are indexed; until then they stay attended."""
        return 0

    @property
    def kept(self) -> Ids | int:
        """Blocks of each row, int32 [R], that every step selects beside its budget."""
        return 0

    @property
    def least(self) -> int:
        """Blocks that every step selects of each row, also where its budget is smaller."""
        return 0

    def clusters(self, rows: slice, first_block: int) -> Ids | None:
        """Cluster of each block from number `first_block` on, int32 [R', n]; None without clusters.

        Blocks of one cluster tend to be selected together.
        """
        return None

    @abstractmethod
    def add_rows(self, segments: Ids) -> None:
        """Empty rows for `segments`, after those there are."""

    @abstractmethod
    def extend(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor, context: IndexContext
    ) -> None:
        """Index more tokens: keys [R', n, d], values [R', n, e], in whole blocks.

        The first call of a row is its build, after prefill; later ones append. ConfigError, and no
        change, if a key that it looks at is NaN or infinite.
        Requires: the rows have equally many blocks, made by the same calls.
        """

    @abstractmethod
    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        """At most ``budgets[r]`` blocks for each row, and `kept` ones; all if there are no more.

        An index with a threshold of its own may select fewer.

        query: [R, G, d] elements. beside: float32 [R, G], log-sum-exp of the logits of the tokens
        that are attended in any case and are no part of a block; None for no such tokens. A score
        is a part of the attention to all tokens. The answer is valid until the next call.
        """

    def part(self, rows: slice, scratch: Scratch, table_scratch: Scratch) -> Index | None:
        """An index that selects for some rows only, and knows of them what this one does.

        It is asked only to `select`, with arrays of its rows, and is of no use after `add_rows` or
        `arrange_rows`. It works in the scratch memory given, that of the device and that of the
        host, which may be the same. None, the default: the index selects for all rows at once.
        """
        return None

    @abstractmethod
    def truncate(self, rows: slice, blocks: int) -> None:
        """Forget blocks from number `blocks` on."""

    @abstractmethod
    def arrange_rows(self, rows: Sequence[int], segments: Ids) -> None:
        """Let new row i be a copy of row ``rows[i]`` under ``segments[i]``; others are dropped."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes the index occupies."""

    def grown_bytes(self, rows: int, blocks: int, memory: Memory) -> int:
        """Bytes of `memory` that it may come to occupy with so many rows of so many blocks.

        By that new sequences are let in; 0 where an index cannot tell.
        """
        return 0

    @abstractmethod
    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays from which `restore` makes an equal index."""

    @abstractmethod
    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """Take over a saved state; StoreMismatchError if it is of another shape."""


class Codec(ABC):
    """Turns an extent (the blocks of one I/O) into stored bytes and back. Threads may share one.

    name: how people choose it. code: the byte on disk that says how an extent was coded, for ever;
    0 to 63 are this library's, 128 to 255 are yours. is_lossless: whether every block comes back
    byte for byte; a lossy codec states its error bound. unit_bytes: blocks are a multiple of it.
    """

    name: str
    code: int
    is_lossless: bool
    unit_bytes: int = 1

    @property
    def signature(self) -> str:
        """What codecs must have in common for one to read what the other wrote; the name, here.

        Part of the identity of what is stored: at most 255 characters, the same in every process.
        """
        return self.name

    @abstractmethod
    def encode(self, blocks: Bytes) -> Bytes:
        """Stored bytes, uint8 [m], of blocks uint8 [n, nbytes]; m <= ``bound(blocks.nbytes)``.

        Equal blocks give equal bytes. Every block is accepted: what a lossy codec cannot code (NaN,
        infinity) comes back byte for byte. The result may share memory with `blocks`. ConfigError
        if nbytes is no multiple of `unit_bytes`.
        """

    @abstractmethod
    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Fill out uint8 [n, nbytes] from what `encode` made of blocks of that shape.

        CorruptBlockError if `stored` cannot be that, whatever its bytes; `out` then holds any
        bytes. Allocates no more than a few times the size of `stored` and `out`: a length found
        inside `stored` is compared, never believed.
        """

    @abstractmethod
    def bound(self, nbytes: int) -> int:
        """Most bytes that `encode` may return for so many bytes."""
