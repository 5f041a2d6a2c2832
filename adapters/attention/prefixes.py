"""Where prompts that were computed once are kept, for every process on this machine."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, StoreLockedError, TierstoreError
from tierstore.events import emit
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.sizes import parse_size
from tierstore.volume.format import PAGE
from tierstore.volume.namespace import absolute

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_IDENTITY = Identity(model="prefixes", layout="tierstore.prefix")
"""One namespace for all models: what must be equal is part of each key and its proof."""
_TRY_AGAIN_SECONDS = 0.01
_LEAST_SEGMENT = 1 << 20


class Prefixes:
    """Prompts' keys, values and indexes, found by their tokens.

    Parameters
    ----------
    place: a directory, made if only its last part is missing; or a `KeyedStore` with a lossless
        codec, which stays its owner's. A directory is open only while a prompt is loaded, beside
        other readers, or saved, alone; so many processes can share it.
    model: what keys and values depend on beside the tokens: a text that is equal for models, and
        only for models, that compute the same.
    disk: most bytes of the directory. They are reserved when the first prompt is saved; what was
        saved first leaves first.
    wait: seconds to wait for a directory that another process has; then there is nothing to load,
        or nothing is saved.
    """

    def __init__(
        self,
        place: str | Path | KeyedStore,
        *,
        model: str = "",
        disk: int | str = "4GiB",
        wait: float = 5.0,
    ) -> None:
        if not isinstance(place, str | Path | KeyedStore):
            raise ConfigError(
                f"prefixes={place!r}: expected a directory, a KeyedStore, or Prefixes of one"
            )
        if not isinstance(place, KeyedStore) and not _may_be_directory(Path(absolute(place))):
            raise ConfigError(
                f"prefixes={str(place)!r}: expected a directory, or a name for one in a directory"
            )
        if not wait >= 0:
            raise ConfigError(f"wait={wait!r} of prefixes: expected seconds, 0 or more")
        self.place = place
        self.model = model
        self.disk_bytes = parse_size(disk, "disk")
        self.wait = wait

    def of(self, model: str) -> Prefixes:
        """The same place, for a model; what was said of one before stays part of it."""
        joined = f"{self.model}\0{model}" if self.model else model
        return Prefixes(self.place, model=joined, disk=self.disk_bytes, wait=self.wait)

    @contextmanager
    def opened(self, *, to_save: bool) -> Iterator[KeyedStore | None]:
        """The store, for one prompt; None where it cannot be had, which is logged."""
        if isinstance(self.place, KeyedStore):
            yield self.place
            return
        store = self._open(Path(self.place), to_save=to_save)
        if store is None:
            yield None
            return
        try:
            yield store
        finally:
            try:
                store.close()
            except OSError as error:  # of the last sync
                self._say_missed(error)

    def _open(self, path: Path, *, to_save: bool) -> KeyedStore | None:
        is_there = (path / _IDENTITY.folder).is_dir()
        if not to_save and not is_there:
            return None
        # Few files, as each costs time at every opening.
        segment = None if is_there else max(_LEAST_SEGMENT, self.disk_bytes // 16 // PAGE * PAGE)
        until = time.monotonic() + self.wait
        while True:
            try:
                return KeyedStore(
                    path, _IDENTITY, disk=self.disk_bytes, read_only=not to_save, segment=segment
                )
            except StoreLockedError as error:
                if time.monotonic() >= until:
                    self._say_missed(error)
                    return None
                time.sleep(_TRY_AGAIN_SECONDS)
            except (TierstoreError, OSError) as error:
                self._say_missed(error)
                return None

    def _say_missed(self, error: Exception) -> None:
        emit(
            _log, logging.WARNING, "prefixes.missed", f"prefixes in {str(self.place)!r}: {error}",
            path=str(self.place), error=str(error),
        )  # fmt: skip


def _may_be_directory(path: Path) -> bool:
    return path.is_dir() or (path.parent.is_dir() and not path.exists())
