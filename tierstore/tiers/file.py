"""A tier in segment files: checksummed extents of many blocks, coded, read past the page cache."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierstore.aligned import AlignedBuffers
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError, TierOfflineError
from tierstore.events import emit
from tierstore.identity import Identity
from tierstore.interfaces import DONE, Bytes, Completion, Ids, Pointers, Tier
from tierstore.io import FileIO
from tierstore.sizes import parse_size
from tierstore.tiers.memory import copy, copy_pieces_of
from tierstore.volume import Stored, Volume
from tierstore.volume.capacity import capacity_of, directory_bytes
from tierstore.volume.format import PAGE, KeyFields, extent_size, extents_in
from tierstore.volume.leftovers import remove_namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from tierstore.interfaces import Codec
    from tierstore.layout import BlockLayout

_log = logging.getLogger(__name__)

_STAGING_BYTES = 8 << 20
_MOST_AT_ONCE = 512
_OPEN_EXTENTS = 64
_SEGMENT_BYTES = 64 << 20


@dataclass(slots=True)
class _OpenExtent:
    """Blocks of an extent that is not on disk as it should be."""

    blocks: Bytes
    is_written: list[bool] = field(default_factory=list)


class FileTier(Tier):
    """Blocks on disk, `extent_bytes` of them together.

    An extent goes to disk once all of its blocks are written, at `sync`, or when more than 64 are
    incomplete. What comes back is checked; a damaged extent is a CorruptBlockError. After `sync`,
    blocks survive a power loss, and a tier made with the same arguments has them again once it is
    resized. With fewer slots, files go that hold none of them; others keep their size.

    Parameters
    ----------
    path: a directory for its files, made (0700) if its parent exists.
    limit: most bytes on disk; None for what the file system has.
    codec: how extents are coded; lossy ones return blocks within their error bound.
    extent_bytes: a multiple of 4 KiB; the unit of reads, so more is better where blocks that
        are wanted together were written together.
    """

    def __init__(
        self,
        layout: BlockLayout,
        path: str | Path,
        limit: int | str | None = None,
        *,
        codec: Codec | None = None,
        extent_bytes: int = 1 << 16,
        name: str = "disk",
        io: FileIO | None = None,
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % PAGE:
            raise ConfigError(f"extent_bytes={extent_bytes}: expected a multiple of {PAGE}")
        self.name = name
        self.layout = layout
        self.path = Path(path).absolute()
        self._io = FileIO() if io is None else io
        self._limit_bytes = None if limit is None else parse_size(limit, name)
        self._codec = None if codec is None or codec.code == 0 else codec
        self._each = max(1, extent_bytes // layout.block_bytes)
        raw = self._each * layout.block_bytes
        self._usual_bytes = _usual_bytes(self._codec, self._each, layout.block_bytes)
        self._extent_bytes = extent_size(self._usual_bytes)
        self._segment_bytes = self._fitting_segment()
        self._slots = 0
        self._open: OrderedDict[int, _OpenExtent] = OrderedDict()
        self._written: set[int] = set()
        """Extents that are on disk, unless it lost them."""
        most = raw if self._codec is None else self._codec.bound(raw)
        self._at_once = min(max(16, _STAGING_BYTES // extent_size(most)), _MOST_AT_ONCE)
        """Extents that are read together."""
        self._staging = AlignedBuffers(extent_size(most), self._at_once)
        self._volume: Volume | None = None

    def _fitting_segment(self) -> int:
        """Bytes of a segment file: 1/64 of the limit, and room for a few extents."""
        share = _SEGMENT_BYTES if self._limit_bytes is None else self._limit_bytes // 64
        extents = max(4, share // self._extent_bytes)
        while extents_in(size := 2 * PAGE + extents * self._extent_bytes, self._extent_bytes) < 4:
            extents += 1
        return min(size, 1 << 34)

    @property
    def medium(self) -> str:
        how = "direct" if self._volume is not None and self._volume.is_direct else "buffered"
        return f"files ({how} reads, {'raw' if self._codec is None else self._codec.name})"

    @property
    def is_lossless(self) -> bool:
        return self._codec is None or self._codec.is_lossless

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def limit(self) -> int:
        if self._limit_bytes is None:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            room = self.used_bytes + self._io.free_bytes(str(self.path.parent))
        else:
            room = self._limit_bytes
        segments = (room - directory_bytes(room)) // self._segment_bytes
        return max(0, segments * self._per_segment * self._each)

    @property
    def _per_segment(self) -> int:
        return extents_in(self._segment_bytes, self._extent_bytes)

    @property
    def used_bytes(self) -> int:
        return 0 if self._volume is None else self._volume.disk_bytes

    def resize(self, slots: int) -> None:
        if slots > self._slots and slots > self.limit:
            raise CapacityError(
                f"{self.name}: {slots} blocks of {self.layout.block_bytes} bytes, at most "
                f"{self.limit} fit: raise the limit or free disk space"
            )
        extents = -(-slots // self._each)
        if extents == 0:
            self._remove()
            return
        segments = -(-extents // self._per_segment)
        needed = capacity_of(segments, self._segment_bytes)
        if self._volume is None:
            self._volume = self._opened(needed)
            self._written = set(self._stored_extents())
        self._drop_from(slots)
        is_smaller = segments < len(self._volume.files.by_number)
        # Extents that stay may be spread over more files than they need.
        with suppress(CapacityError) if is_smaller else nullcontext():
            self._volume.resize(needed)
        self._slots = slots

    def _opened(self, capacity_bytes: int) -> Volume:
        identity = Identity(
            layout=self.layout.signature,
            block=(self._each, self.layout.block_bytes),
            codec="raw" if self._codec is None else self._codec.signature,
        )
        return Volume(
            self.path, identity, capacity_bytes=capacity_bytes, segment_bytes=self._segment_bytes,
            recovery="quiet", read_only=False, io=self._io, evicts=False,
        )  # fmt: skip

    def _drop_from(self, slots: int) -> None:
        """Forget extents that no slot below `slots` is in."""
        extents = -(-slots // self._each)
        for extent in [extent for extent in self._open if extent >= extents]:
            del self._open[extent]
        self._written = {extent for extent in self._written if extent < extents}
        stored = self._stored_extents()
        self._kill([extent for extent in stored if extent >= extents])

    def _stored_extents(self) -> list[int]:
        assert self._volume is not None
        records = self._volume.records
        return [int.from_bytes(records.key(int(p)), "little") for p in records.live_places()]

    def _kill(self, extents: list[int]) -> None:
        assert self._volume is not None
        with self._volume.lock:
            places = self._volume.records.find(_keys(extents))
            self._volume.kill(places[places >= 0], "dropped")

    def _remove(self) -> None:
        """Have no slots, and no files; what somebody else put beside them stays."""
        self._slots = 0
        self._open.clear()
        self._written.clear()
        if self._volume is not None:
            volume, self._volume = self._volume, None
            volume.abandon()
            try:
                remove_namespace(volume.directory)
            except ConfigError as error:
                emit(
                    _log, logging.WARNING, "files.left", f"{self.name}: {error}",
                    tier=self.name, path=volume.directory, error=str(error),
                )  # fmt: skip

    # Writing

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self.layout.spans(parts)
        complete: dict[int, Bytes] = {}
        for extent, chosen in self._by_extent(slots):
            inside = (slots[chosen] - extent * self._each).astype(np.int32)
            if parts is None and len(chosen) == self._each:
                whole: Bytes = np.empty((self._each, self.layout.block_bytes), np.uint8)
                copy(blocks, rows[chosen], whole, inside, 0, self.layout.block_bytes)
                self._open.pop(extent, None)
                complete[extent] = whole
                continue
            opened = self._opened_extent(extent)
            for start, stop in spans:
                copy(blocks, rows[chosen], opened.blocks, inside, start, stop)
            for place in inside.tolist():
                opened.is_written[place] = True
            if all(opened.is_written):
                complete[extent] = self._open.pop(extent).blocks
        while len(self._open) > _OPEN_EXTENTS:
            extent, opened = self._open.popitem(last=False)
            complete[extent] = opened.blocks
        self._store_or_keep(complete)
        return DONE

    def _store_or_keep(self, extents: dict[int, Bytes]) -> None:
        """Bring extents to disk; they stay open if that fails."""
        try:
            self._store(extents)
        except BaseException:
            for extent, blocks in extents.items():
                self._open[extent] = _OpenExtent(blocks, [True] * self._each)
            raise

    def _by_extent(self, slots: Ids) -> Iterator[tuple[int, Ids]]:
        """Extent numbers, and the positions in `slots` of those in them."""
        extents = slots // self._each
        order = np.argsort(extents, kind="stable").astype(np.int32)
        breaks = np.flatnonzero(np.diff(extents[order])) + 1
        for chosen in np.split(order, breaks):
            if len(chosen):
                yield int(extents[chosen[0]]), chosen

    def _opened_extent(self, extent: int) -> _OpenExtent:
        """An extent to change: the one that is open, or what is on disk of it."""
        opened = self._open.get(extent)
        if opened is None:
            blocks = np.zeros((self._each, self.layout.block_bytes), np.uint8)
            was_stored = False
            for _, found, at in self._loaded([extent]):
                blocks.reshape(-1)[:] = found[int(at[0]) :][: blocks.size]
                was_stored = True
            opened = self._open[extent] = _OpenExtent(blocks, [was_stored] * self._each)
        return opened

    def _store(self, extents: dict[int, Bytes]) -> None:
        waiting = list(extents)
        while waiting:
            done = self._write_extents(waiting, extents)
            self._written.update(
                extent for extent, is_done in zip(waiting, done, strict=True) if is_done
            )
            waiting = [extent for extent, is_done in zip(waiting, done, strict=True) if not is_done]
            if waiting and not self._grow():
                assert self._volume is not None
                raise TierOfflineError(
                    errno.ENOSPC,
                    f"{self.name}: {len(waiting)} of {len(extents)} extents were not written "
                    f"({dict(+self._volume.refused)}): raise the limit or free disk space",
                )

    def _write_extents(self, extents: list[int], blocks: dict[int, Bytes]) -> npt.NDArray[np.bool_]:
        assert self._volume is not None
        code = 0 if self._codec is None else self._codec.code
        if self._codec is None:
            pieces = [blocks[extent].reshape(-1).data for extent in extents]
        else:
            pieces = [self._codec.encode(blocks[extent]).data for extent in extents]
        raw, n = self._each * self.layout.block_bytes, len(extents)
        stored = Stored(pieces, [raw] * n, code, [self._each] * n, self._usual_bytes)
        return self._volume.write(_keys(extents), stored)

    def _grow(self) -> bool:
        """Have another file, for extents that came out longer than usual; False at the limit."""
        assert self._volume is not None
        capacity = capacity_of(len(self._volume.files.by_number) + 1, self._segment_bytes)
        if self._limit_bytes is not None and capacity > self._limit_bytes:
            return False
        try:
            self._volume.resize(capacity)
        except (CapacityError, OSError):
            return False
        return True

    # Reading

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self.layout.spans(parts)
        inside = slots % self._each
        order = np.argsort(slots, kind="stable")
        extents, first, counts = np.unique(
            slots[order] // self._each, return_index=True, return_counts=True
        )

        def take(which: Pointers, source: Bytes, at: Pointers) -> None:
            """Blocks of extents that begin in `source` at `at`."""
            starts, many = first[which], counts[which]
            steps = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
            wanted = order[np.repeat(starts, many) + steps]
            from_ = np.repeat(at, many) + inside[wanted] * np.int64(self.layout.block_bytes)
            for start, stop in spans:
                copy_pieces_of(source, from_, out, rows[wanted], start, stop)

        stored = []
        for number, extent in enumerate(extents.tolist()):
            opened = self._open.get(extent)
            if opened is None:
                stored.append(number)
            else:
                take(np.array([number]), opened.blocks.reshape(-1), np.zeros(1, np.int64))
        on_disk = np.array(stored, np.int64)
        for found, source, at in self._loaded(extents[on_disk].tolist()):
            take(on_disk[found], source, at)
        return DONE

    def _loaded(self, extents: list[int]) -> Iterator[tuple[Pointers, Bytes, Pointers]]:
        """Those extents that are on disk, many at a time.

        Their positions in `extents`, and the flat bytes that each begins in, at a place of its own;
        valid until the next.
        """
        if not extents or self._volume is None:
            return
        volume = self._volume
        with volume.lock:
            places = volume.records.find(_keys(extents))
            found = np.flatnonzero(places >= 0)
            lost = self._written.intersection(np.array(extents)[places < 0].tolist())
            if lost:
                raise CorruptBlockError(
                    errno.EIO,
                    f"{self.name}: extents {sorted(lost)[:8]} were damaged and are lost: drop the "
                    "segments whose blocks they hold",
                )
            volume.pin(places[found])
        try:
            waiting = found
            while len(waiting):
                buffers = self._staging.take(min(len(waiting), self._at_once))
                outcomes: Sequence[Exception | None] = ()
                try:
                    now, waiting = waiting[: len(buffers)], waiting[len(buffers) :]
                    outcomes = volume.read(places[now].tolist(), buffers, None)
                    for outcome in outcomes:
                        if outcome is not None:
                            raise outcome
                    yield now, *self._decoded(places[now], buffers)
                finally:
                    self._staging.give(buffers, outcomes)
        finally:
            volume.let_go(places[found])

    def _decoded(self, places: Pointers, buffers: list[memoryview]) -> tuple[Bytes, Pointers]:
        """Extents that were read into buffers: flat bytes, and where in them each begins."""
        assert self._volume is not None
        if self._codec is None:
            return self._staging.memory, self._staging.offsets(buffers)
        sizes = self._volume.records.rows["stored_bytes"][places].tolist()
        out: Bytes = np.empty((len(buffers), self._each, self.layout.block_bytes), np.uint8)
        for blocks, buffer, size in zip(out, buffers, sizes, strict=True):
            self._codec.decode(np.frombuffer(buffer[:size], np.uint8), blocks)
        return out.reshape(-1), np.arange(len(buffers)) * out[0].size

    def sync(self) -> None:
        if self._volume is not None:
            extents, self._open = dict(self._open), OrderedDict()
            self._store_or_keep({extent: opened.blocks for extent, opened in extents.items()})
            self._volume.sync()

    def close(self) -> None:
        if self._volume is not None:
            volume, self._volume = self._volume, None
            self._slots = 0
            self._open.clear()
            volume.close()


def _usual_bytes(codec: Codec | None, blocks: int, block_bytes: int) -> int:
    """Bytes that an extent has on disk.

    Lossless codes vary in length; quantised ones do not, but for extents that cannot be coded.
    """
    raw = blocks * block_bytes
    if codec is None:
        return raw
    if codec.is_lossless:
        return codec.bound(raw)
    return codec.encode(np.zeros((blocks, block_bytes), np.uint8)).nbytes


def _keys(extents: list[int]) -> KeyFields:
    numbers = np.array(extents, "<u8").reshape(-1, 1)
    return KeyFields(numbers.view(np.uint8).reshape(-1, 8))
