"""The keyed face: values under opaque keys, in memory over a durable volume.

``put`` makes a value readable in this process; ``sync`` makes everything readable survive a power
loss. A value may be lost at any time before that, and evicted after it; each loss is counted with
its reason. What comes back is exactly what was put, or nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from tierstore.admission import Admission, AdmitAll
from tierstore.arguments import check_choice, check_deadline, check_out, key_list, too_narrow, views
from tierstore.background import Prefetch, Prefetcher, in_time
from tierstore.deadlines import end_of
from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.hot import HotCache
from tierstore.identity import Identity
from tierstore.interfaces import Codec
from tierstore.io import FileIO
from tierstore.kernels import keys as kernels
from tierstore.lease import Lease, Leases
from tierstore.loading import Loader
from tierstore.metrics import KeyedStats
from tierstore.serving import Serving, say_failed
from tierstore.sizes import parse_size
from tierstore.storing import Storing
from tierstore.volume import Finding, Volume
from tierstore.volume.format import LIVE, PAGE, KeyFields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from tierstore.arguments import Keys, Values
    from tierstore.interfaces import Bytes, Pointers, RecordTier
    from tierstore.volume.records import Visited
    from tierstore.volume.verifier import Progress

_KEYS_AT_ONCE = 4096


class KeyedStore:
    """Values under keys of 1 to 511 bytes, in one namespace of a directory.

    Any thread may call. Batch methods take a sequence of bytes, or an array uint8 [n, key bytes],
    as keys; `deadline` is in seconds from the call. Wrong arguments are a ConfigError at once, and
    change nothing; a disk that fails, damage and lack of room make a miss or a refusal, counted in
    `stats`. In a forked child every method is a ConfigError.

    Parameters
    ----------
    path: directory of namespaces; made (0700) if only its last part is missing.
    identity: whose values they are. Another identity is another namespace, with files of its own.
    disk: most bytes on disk; all of them are reserved when the store opens.
    dram: most bytes of values in memory in front of it; None for none.
    codec: how values are coded on disk, as they are by default; part of the identity, with its
        parameters where decoding depends on them.
    admission: which values may be written to disk; a remote tier gets all of them.
    remote: a tier behind the disk, which other machines may share.
    verify: ``"reads"`` checks what comes from disk, ``"always"`` also what was just written.
    recovery: ``"quiet"`` drops what is found damaged on opening, ``"strict"`` raises
        CorruptBlockError.
    segment: bytes of a segment file, a multiple of 4 KiB; a value must fit into one.
    threads: reads of the disk that may be under way at once.
    io, clock: what touches files, and tells time; for tests.

    Raises StoreLockedError if another process has the namespace open, StoreMismatchError if its
    directory holds something else, CapacityError if the disk has no room.
    """

    def __init__(
        self,
        path: str | Path,
        identity: Identity,
        *,
        disk: int | str,
        dram: int | str | None = None,
        codec: Codec | None = None,
        admission: Admission | None = None,
        remote: RecordTier | None = None,
        verify: Literal["reads", "always"] = "reads",
        recovery: Literal["quiet", "strict"] = "quiet",
        read_only: bool = False,
        segment: int | str | None = None,
        threads: int = 32,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_choice("verify", verify, ("reads", "always"))
        check_choice("recovery", recovery, ("quiet", "strict"))
        if not isinstance(identity, Identity):
            raise ConfigError(f"identity={identity!r}: expected a tierstore.identity.Identity")
        disk_bytes = parse_size(disk, "disk")
        dram_bytes = None if dram is None else parse_size(dram, "dram")
        if dram_bytes is not None:
            HotCache.check_limit(dram_bytes)
        segment_bytes = None if segment is None else parse_size(segment, "segment")
        if codec is not None and not isinstance(codec, Codec):
            raise ConfigError(f"codec={codec!r}: expected a tierstore.interfaces.Codec")
        codec = None if codec is None or codec.code == 0 else codec
        identity = replace(identity, codec="raw" if codec is None else codec.signature)
        admission = AdmitAll() if admission is None else admission
        if not isinstance(admission, Admission):
            raise ConfigError(f"admission={admission!r}: expected a tierstore.admission.Admission")
        self._remote = remote
        self._process = os.getpid()
        self._is_closing = False
        self.volume = Volume(
            path, identity, capacity_bytes=disk_bytes,
            segment_bytes=segment_bytes, recovery=recovery, read_only=read_only,
            io=FileIO() if io is None else io, threads=threads,
        )  # fmt: skip
        self._prefetcher = Prefetcher()
        try:
            self._loader = Loader(self.volume, codec)
            if dram_bytes is not None:
                self._loader.hot = HotCache(dram_bytes, self.volume.records)
        except BaseException:  # no memory
            self.volume.close()
            raise
        self.volume.on_free = self._on_free
        self._storing = Storing(self.volume, self._loader, codec, admission, verify, clock)
        self._serving = Serving(self.volume, self._loader, remote, self._storing.put)
        self._leases = Leases(self.volume, clock)

    @property
    def hot(self) -> HotCache | None:
        """The memory tier, if there is one."""
        return self._loader.hot

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing

    @property
    def identity(self) -> Identity:
        """Whose values they are."""
        return self.volume.identity

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closing:
            raise ConfigError("the store is closed: open it again")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(
                f"the store was opened in process {self._process} and this is a fork of it: open "
                "stores after forking"
            )

    def _on_free(self, places: Pointers) -> None:
        if self.hot is not None:
            self.hot.unlink(places)

    # Writing

    def put_many(
        self, keys: Keys, values: Values, *, deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Store each value under its key, in place of what was there; which are readable now.

        values: bytes-like, each, of any length that fits into a segment; they are copied. Others
        are refused and leave no trace: see ``stats().refused``. Of a key given twice the last value
        counts.
        """
        self._check_open()
        check_deadline(deadline)
        fields, pieces = KeyFields(keys), views(values)
        if len(pieces) != len(fields):
            raise ConfigError(f"{len(fields)} keys and {len(pieces)} values: expected one for each")
        self._leases.reap()
        until = end_of(deadline)
        try:
            done = in_time(lambda: self._storing.put(fields, pieces, until), deadline, "put")
        except TierOfflineError:
            done = np.zeros(len(fields), np.bool_)
        if self._remote is not None:
            try:
                self._remote.write(key_list(keys), [bytes(piece) for piece in pieces])
            except OSError as error:
                self.volume.refused["remote"] += len(pieces)
                say_failed(self._remote, error)
        return done

    def put(
        self,
        key: bytes,
        value: bytes | bytearray | memoryview | Bytes,
        *,
        deadline: float | None = None,
    ) -> bool:
        """Store a value under a key; whether it is readable now."""
        return bool(self.put_many([key], [value], deadline=deadline)[0])

    # Reading

    def get_into(self, keys: Keys, out: Bytes, *, deadline: float | None = None) -> Pointers:
        """Copy values to the start of the rows of out, uint8 [n, m]; their lengths, -1 for a miss.

        ConfigError if a value is longer than m; nothing is copied then, unless it is the remote
        tier's. Rows of misses hold anything. Values of m bytes come from disk without a copy where
        m is a multiple of 4 KiB and out begins at one, as `aligned_rows` makes it, and there is no
        deadline; a disk that hangs may then write to out even after the store was closed.
        """
        self._check_open()
        check_deadline(deadline)
        fields = KeyFields(keys)
        check_out(out, len(fields))
        lengths: Pointers = np.full(len(fields), -1, np.int64)

        def take_cached(visited: Visited) -> None:
            longest, nbytes = kernels.to_copy(visited.pages, visited.sizes)
            if longest > out.shape[1]:
                raise ConfigError(too_narrow(out, longest))
            if self.hot is not None and visited.hits:
                self.hot.copy_out(visited, nbytes, out, lengths)

        is_aligned = out.ctypes.data % PAGE == 0 and out.strides == (out.shape[1], 1)

        def target(position: int, nbytes: int) -> memoryview | None:
            if nbytes != out.shape[1] or nbytes % PAGE:
                return None
            row: memoryview = out[position].data
            return row

        def take(position: int, value: memoryview) -> None:
            if len(value) > out.shape[1]:
                raise ConfigError(too_narrow(out, len(value)))
            source = np.frombuffer(value, np.uint8)
            if not np.may_share_memory(source, out):  # else it was read into its row
                out[position, : len(value)] = source
            lengths[position] = len(value)

        self._serving.serve(
            keys, fields, take_cached, take, deadline, target if is_aligned else None
        )
        return lengths

    def get_many(self, keys: Keys, *, deadline: float | None = None) -> list[bytes | None]:
        """The value of each key; None for a miss."""
        self._check_open()
        check_deadline(deadline)
        fields = KeyFields(keys)
        values: list[bytes | None] = [None] * len(fields)

        def take_cached(visited: Visited) -> None:
            for i in np.flatnonzero(visited.pages >= 0).tolist() if visited.hits else ():
                assert self.hot is not None
                page, size = int(visited.pages[i]), int(visited.sizes[i])
                values[i] = self.hot.value(page, size).tobytes()

        def take(position: int, value: memoryview) -> None:
            values[position] = bytes(value)

        self._serving.serve(keys, fields, take_cached, take, deadline)
        return values

    def get(self, key: bytes, *, deadline: float | None = None) -> bytes | None:
        """The value of a key; None for a miss."""
        return self.get_many([key], deadline=deadline)[0]

    def contains_many(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which keys have a value, as far as is known without reading it."""
        self._check_open()
        with self.volume.lock:
            is_there: npt.NDArray[np.bool_] = self.volume.records.find(KeyFields(keys)) >= 0
        if self._remote is not None and not is_there.all():
            absent = np.flatnonzero(~is_there)
            everything = key_list(keys)
            try:
                found = self._remote.contains([everything[i] for i in absent.tolist()])
            except OSError as error:
                say_failed(self._remote, error)
            else:
                is_there[absent] = found
        return is_there

    def contains(self, key: bytes) -> bool:
        """Whether a key has a value."""
        return bool(self.contains_many([key])[0])

    def touch_many(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Count values as used now, so that they leave later; which of them are there."""
        self._check_open()
        records = self.volume.records
        with self.volume.lock:
            places = records.find(KeyFields(keys))
            records.touch(places[places >= 0])
        is_there: npt.NDArray[np.bool_] = places >= 0
        return is_there

    def touch(self, key: bytes) -> bool:
        """Count a value as used now; whether it is there."""
        return bool(self.touch_many([key])[0])

    def lease_many(
        self, keys: Keys, *, owner: str, seconds: float, deadline: float | None = None
    ) -> Lease:
        """Hold values for reading in place: no copy is made of those in memory.

        owner: for reports. seconds: from now on the lease lives; the store may end it after that.
        """
        self._check_open()
        check_deadline(deadline)
        if not (isinstance(seconds, int | float) and seconds > 0):
            raise ConfigError(f"seconds={seconds!r} of a lease: expected more than 0")
        fields = KeyFields(keys)
        self._leases.reap()
        values, places = self._serving.hold(keys, fields, deadline)
        return self._leases.add(owner, seconds, values, places)

    def lease(self, key: bytes, *, owner: str, seconds: float) -> Lease:
        """Hold one value for reading in place."""
        return self.lease_many([key], owner=owner, seconds=seconds)

    def prefetch(self, keys: Keys) -> Prefetch:
        """Begin to bring values into memory, in the background; nothing without a memory tier."""
        self._check_open()
        fields = KeyFields(keys)
        if self.hot is None:
            return Prefetch.done()
        return self._prefetcher.add(lambda: self._serving.load(keys, fields))

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys on this machine that begin with `prefix`, in no particular order.

        Each that is there all the while comes once.
        """
        self._check_open()
        return self._keys(prefix)

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        with self.volume.lock:
            places = self.volume.records.live_places()
            sequences = self.volume.records.rows["sequence"][places]
        for start in range(0, len(places), _KEYS_AT_ONCE):
            part = slice(start, start + _KEYS_AT_ONCE)
            with self.volume.lock:
                rows = self.volume.records.rows[places[part]]
                is_same = (rows["sequence"] == sequences[part]) & (rows["state"] == LIVE)
                own = places[part][is_same].tolist()
                found = [self.volume.records.key(place) for place in own]
            yield from (key for key in found if key.startswith(prefix))

    def __iter__(self) -> Iterator[bytes]:
        return self.keys()

    def __len__(self) -> int:
        self._check_process()
        return self.volume.records.live

    def __contains__(self, key: bytes) -> bool:
        return self.contains(key)

    # Removing

    def delete_many(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Remove values; which of them were there. They never come back.

        TierOfflineError if the disk cannot take note of it: then they are gone from this process,
        and may be there when the store is opened again.
        """
        self._check_open()
        fields = KeyFields(keys)
        with self.volume.lock:
            self.volume.check_writable()
            self.volume.removals += 1
            places = self.volume.records.find(fields)
            self.volume.kill(np.unique(places[places >= 0]), "deleted")
            self.volume.check_writable()
        was_there: npt.NDArray[np.bool_] = places >= 0
        if self._remote is not None:
            self._remote.remove(key_list(keys))
        return was_there

    def delete(self, key: bytes) -> bool:
        """Remove a value; whether it was there."""
        return bool(self.delete_many([key])[0])

    def clear(self) -> None:
        """Remove everything, durably, at a cost that does not depend on how much there is."""
        self._check_open()
        self.volume.clear()
        if self._remote is not None:
            self._remote.clear()

    # Durability and the end

    def sync(self, deadline: float | None = None) -> None:
        """Return when everything readable now survives a power loss.

        OSError if it may not: then nothing since the last good sync is promised; call again.
        TierOfflineError after `deadline` seconds.
        """
        self._check_open()
        check_deadline(deadline)
        in_time(self.volume.sync, deadline, "sync")

    def resize(self, *, disk: int | str | None = None, dram: int | str | None = None) -> None:
        """Change limits; values that no longer fit leave.

        CapacityError, and no change of that limit, if leased values are in the way.
        """
        self._check_open()
        if dram is not None:
            limit = parse_size(dram, "dram")
            with self.volume.lock:
                self._leases.reap()
                self._replace_hot(limit)
        if disk is not None:
            self.volume.resize(parse_size(disk, "disk"))

    def _replace_hot(self, limit_bytes: int) -> None:
        records = self.volume.records
        if self.hot is not None and self.hot.has_pinned():
            raise CapacityError(
                f"dram: {len(self._leases)} leases hold values in it: release them first"
            )
        fresh = HotCache(limit_bytes, records)
        if self.hot is not None:
            self.hot.clear()
        self._loader.hot = fresh

    def stats(self) -> KeyedStats:
        """Counters and sizes, as of now."""
        self._check_process()
        with self.volume.lock, self._serving.counting:
            volume = self.volume
            return KeyedStats(
                records=volume.records.live,
                hits=dict(self._serving.hits),
                misses=dict(+self._serving.misses),
                refused=dict(+volume.refused),
                dropped=dict(+volume.dropped),
                errors=dict(+volume.health.errors),
                disk_bytes=volume.disk_bytes,
                dram_bytes=0 if self.hot is None else self.hot.used_bytes,
                metadata_bytes=volume.records.nbytes,
                leases=len(self._leases),
                is_offline=volume.health.is_offline,
                reads="direct" if volume.is_direct else "buffered",
            )

    def check(self, fix: bool = False, *, progress: Progress | None = None) -> list[Finding]:
        """Compare files, tables, directory and memory, and verify every payload on disk.

        The store goes on serving meanwhile. With `fix`, what is damaged is dropped and all else
        repaired. A second check finds no more than foreign files, which are never touched, and what
        the disk cannot read, which may be right and is kept.
        progress: called with bytes of payloads verified so far, and of all.

        OSError if the disk refuses a repair; call again.
        """
        self._check_open()
        return self.volume.check(fix=fix, progress=progress)

    def close(self, deadline: float = 30.0) -> None:
        """Sync and give up the directory; leases end. A second call does nothing.

        OSError if the last sync failed, TierOfflineError after `deadline` seconds; the store is
        closed all the same.
        """
        check_deadline(deadline)
        if os.getpid() != self._process or self._is_closing:
            return
        self._is_closing = True
        self._prefetcher.close()
        in_time(lambda: self._close(deadline), deadline, "close")

    def _close(self, deadline: float) -> None:
        self._leases.end_all()
        self.volume.close(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def validate(self) -> None:
        """Assert every invariant; for tests."""
        with self.volume.lock:
            self.volume.validate()
            if self.hot is not None:
                self.hot.validate()
