"""How values come to the disk of this machine: admitted, coded, written, and read back if asked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from tierstore.admission import Admission, AdmitAll
from tierstore.errors import ConfigError, PolicyError, TierOfflineError
from tierstore.kernels import keys as kernels
from tierstore.volume import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from tierstore.interfaces import Codec
    from tierstore.loading import Loader
    from tierstore.volume import Volume
    from tierstore.volume.format import KeyFields


class Storing:
    """Writes values to a volume, as far as an admission policy lets it. Any thread may call.

    codec: how they are coded, None for as they are. verify: "always" reads each value again. clock:
    tells the policy the time.
    """

    def __init__(
        self,
        volume: Volume,
        loader: Loader,
        codec: Codec | None,
        admission: Admission,
        verify: Literal["reads", "always"],
        clock: Callable[[], float],
    ) -> None:
        self._volume = volume
        self._loader = loader
        self._codec = codec
        self._admission = admission
        self._verify = verify
        self._clock = clock

    def put(
        self,
        fields: KeyFields,
        pieces: Sequence[memoryview],
        until: float | None,
        keep: int | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Store values on this machine, by the time `until`: later the caller's buffers may change.

        keep: as for `Volume.write`.
        """
        done = self._admitted(fields, pieces)
        latest = fields.latest() if len(fields) > 1 else np.zeros(1, np.int64)[: len(fields)]
        chosen = np.flatnonzero(done & (latest == np.arange(len(fields))))
        done[:] = False
        if not len(chosen):
            return done
        own, values = fields, pieces
        if len(chosen) < len(fields):
            own, values = fields.take(chosen), [pieces[i] for i in chosen.tolist()]
        try:
            done[chosen] = self._volume.write(own, self._encoded(values), until, keep)
        except (OSError, MemoryError) as error:
            with self._volume.lock:
                self._volume.refused[self._reason(error)] += len(chosen)
        if self._verify == "always":
            done[chosen] &= self._read_back(own)
        is_last: npt.NDArray[np.bool_] = done[latest]
        return is_last

    def _reason(self, error: Exception) -> str:
        """Why nothing could be written."""
        if isinstance(error, MemoryError):
            return "memory"
        if self._volume.health.is_offline:
            return "offline"
        return "deadline" if isinstance(error, TierOfflineError) else "io"

    def _admitted(self, fields: KeyFields, pieces: Sequence[memoryview]) -> npt.NDArray[np.bool_]:
        if type(self._admission) is AdmitAll:
            return np.ones(len(fields), np.bool_)
        prints = np.empty(len(fields), np.uint64)
        kernels.fingerprints(fields.fields, fields.lengths, prints)
        sizes = np.array([piece.nbytes for piece in pieces], np.int64)
        with self._volume.lock:
            try:
                verdicts = np.array(self._admission.admit(prints, sizes, self._clock()))
            except Exception as error:
                raise PolicyError(
                    f"{type(self._admission).__name__}.admit raised {error!r}"
                ) from error
            if verdicts.shape != prints.shape or verdicts.dtype != np.bool_:
                raise PolicyError(
                    f"{type(self._admission).__name__}.admit returned {verdicts.dtype} "
                    f"{verdicts.shape}: expected bool {prints.shape}"
                )
            if not verdicts.all():
                self._volume.refused["admission"] += int((~verdicts).sum())
        return verdicts

    def _encoded(self, pieces: Sequence[memoryview]) -> Stored:
        sizes = [piece.nbytes for piece in pieces]
        if self._codec is None:
            return Stored(pieces, sizes, 0)
        return Stored([_coded(self._codec, piece) for piece in pieces], sizes, self._codec.code)

    def _read_back(self, fields: KeyFields) -> npt.NDArray[np.bool_]:
        """Which of them are on disk as they should be; the others are dropped."""
        is_right: npt.NDArray[np.bool_] = np.zeros(len(fields), np.bool_)

        def note(position: int, value: memoryview) -> None:
            is_right[position] = True

        with self._volume.lock:
            places = self._volume.records.find(fields)
            found = np.flatnonzero(places >= 0)
            self._volume.pin(places[found])
        try:
            self._loader.load(places, found.tolist(), note, Counter(), None)
        finally:
            self._volume.drop_damaged(places[found[~is_right[found]]], "unverified")
            self._volume.let_go(places[found])
        return is_right


def _coded(codec: Codec, piece: memoryview) -> memoryview:
    name = f"{type(codec).__name__}.encode"
    try:
        coded = codec.encode(np.frombuffer(piece, np.uint8)[None])
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise PolicyError(f"{name} raised {error!r}") from error
    if not isinstance(coded, np.ndarray) or coded.dtype != np.uint8 or coded.ndim != 1:
        raise PolicyError(f"{name} returned {type(coded).__name__}: expected uint8 [m]")
    return np.ascontiguousarray(coded).data
