"""Loading a prompt that was computed before, against computing it again and against the disk.

The prompt is computed and kept once. Then, in each round, one engine computes it and another one
loads it; before each load the page cache loses its files, and reads pass it by where the file
system lets them.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.attention.prefixes import Prefixes
from tierstore.adapters.generate import TierOptions, next_logits
from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.benchmarks import fio
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.keyed import full_segments
from tierstore.benchmarks.language import check_window, kv_bytes, real_text
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.rounds import Measure, Ratio, Say, alternate, listed
from tierstore.benchmarks.workload import forget
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DISK_BLOCK, _DISK_DEPTH = 1 << 20, 32
_PRESET = "kvdrive"
_CONFIGURATIONS = {
    "prefill": "the whole prompt computed, preset kvdrive, all in DRAM",
    "load": "all but the last piece of it loaded into the same tiers: keys, values, indexes",
    "reuse": "the first token of the answer: the load, and the rest computed",
    "disk": "fio, io_uring, direct, 1 MiB blocks in order, depth 32, on the files that were loaded",
}
_RATIOS = (
    Ratio("time of prefill / load", "seconds", "prefill", "load", at_least=60.0),
    Ratio("time to the first token, prefill / reuse", "seconds", "prefill", "reuse"),
)
_BANDWIDTH = Ratio("bandwidth, load / fio", "bandwidth", "load", "disk", at_least=0.6)


class _Round(NamedTuple):
    """What one configuration took in one round. mbps: 0 where no disk was read."""

    seconds: float
    mbps: float
    token: int


def run(
    say: Say, *, repeat: int = 3, tokens: int = 8_000, disk: str | Path | None = None
) -> Findings:
    """Measure SmolLM2-135M-Instruct."""
    say(f"loading {DEMO_MODEL}")
    loaded = load_model(DEMO_MODEL)
    return measure(say, loaded, repeat=repeat, tokens=tokens, disk=disk or tempfile.gettempdir())


def measure(
    say: Say, loaded: LoadedModel, *, repeat: int, tokens: int, disk: str | Path
) -> Findings:
    """Measure a model with a prompt of `tokens`, kept in a new directory below `disk`."""
    machine = Machine.here()
    check_window(loaded.model, tokens)
    text = real_text(loaded.tokenizer, tokens)
    Path(disk).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=disk) as folder:
        course = _Course(loaded, text, Path(folder) / "prefixes")
        say("computing the prompt and keeping it")
        kept_seconds = course.keep()
        runs = {"prefill": course.prefill, "load": course.load, "reuse": course.reuse}
        notes = [f"Keeping the prompt took {kept_seconds:.2f} s beside computing it, once."]
        try:
            course.disk(0)
            runs["disk"] = course.disk
        except fio.FioError as error:
            notes.append(f"Nothing to compare the bandwidth with: {error}.")

        def after_round(number: int, latest: Mapping[str, _Round]) -> None:
            seconds = {name: each.seconds for name, each in latest.items()}
            say(f"round {number} of {repeat}: {listed(seconds)} s")

        rounds = alternate(runs, repeat, after_round, warm_up=0)
    measures = _measures(rounds)
    notes.append(_same_token(rounds))
    return Findings(
        benchmark="prefix",
        machine=machine,
        baseline="prefill",
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "prompt tokens": tokens,
            "loaded tokens": course.loaded_tokens,
            "loaded keys and values": format_size(course.loaded_bytes),
            "file system": file_system_of(Path(disk)),
        },
        configurations={name: _CONFIGURATIONS[name] for name in rounds},
        measures=measures,
        ratios=[*_RATIOS, *([_BANDWIDTH] if "disk" in rounds else [])],
        notes=notes,
    )


def _measures(rounds: Mapping[str, Sequence[_Round]]) -> dict[str, Measure]:
    seconds = {
        name: [each.seconds for each in own] for name, own in rounds.items() if name != "disk"
    }
    bandwidth = {name: [each.mbps for each in own] for name, own in rounds.items() if own[0].mbps}
    return {
        "seconds": Measure("s", seconds),
        "bandwidth": Measure("MB/s of keys and values; page cache dropped", bandwidth),
    }


def _same_token(rounds: Mapping[str, Sequence[_Round]]) -> str:
    pairs = list(zip(rounds["prefill"], rounds["reuse"], strict=True))
    same = sum(one.token == other.token for one, other in pairs)
    return f"The first token was the same in {same} of {len(pairs)} rounds."


class _Course:
    """Computes, keeps and loads one prompt, each time with new tiers."""

    def __init__(self, loaded: LoadedModel, text: Sequence[int], folder: Path) -> None:
        from tierstore.adapters.transformers.prefixes import fingerprint
        from tierstore.adapters.transformers.profile import profile_of

        self._model, self._text, self._folder = loaded.model, text, folder
        self._kv = kv_bytes(loaded.model, len(text))
        self._dram = 3 * self._kv + (64 << 20)
        self._prefixes = Prefixes(folder, disk=2 * self._kv + (256 << 20))
        self._own = self._prefixes.of(fingerprint(profile_of(loaded.model).decoder))
        self.loaded_tokens = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the keys and values that a load brings."""
        return kv_bytes(self._model, self.loaded_tokens)

    def keep(self) -> float:
        """Compute the prompt and keep it; returns what keeping took."""
        from tierstore.adapters.transformers import attach_engine

        engine = self._engine()
        with attach_engine(self._model, engine) as cache:
            next_logits(self._model, self._text, cache.kwargs)
            start = time.perf_counter()
            engine.save_prefix(self._own, [self._text])
            return time.perf_counter() - start

    def _engine(self) -> SparseAttention:
        from tierstore.adapters.transformers import geometry_of

        return SparseAttention(geometry_of(self._model), preset=_PRESET, dram=self._dram)

    def prefill(self, number: int) -> _Round:
        """Compute the whole prompt."""
        return self._first_token(None)

    def reuse(self, number: int) -> _Round:
        """Load the prompt as far as it is kept, and compute the rest."""
        forget(self._folder)
        return self._first_token(self._prefixes)

    def _first_token(self, prefixes: Prefixes | None) -> _Round:
        tiers = TierOptions(_PRESET, dram=self._dram, prefixes=prefixes)
        with tiers.attach(self._model) as cache:
            start = time.perf_counter()
            token = int(next_logits(self._model, self._text, cache.kwargs).argmax())
            return _Round(time.perf_counter() - start, 0.0, token)

    def load(self, number: int) -> _Round:
        """Only load."""
        forget(self._folder)
        with closing(self._engine()) as engine:
            start = time.perf_counter()
            self.loaded_tokens = engine.load_prefix(self._own, [self._text])
            seconds = time.perf_counter() - start
        return _Round(seconds, self.loaded_bytes / seconds / 1e6, -1)

    def disk(self, number: int) -> _Round:
        """Read the files that have the prompt, as far as they are full, with fio."""
        files = full_segments(self._folder)
        mbps = fio.sequential_read(files, _DISK_BLOCK, _DISK_DEPTH)
        return _Round(0.0, mbps, -1)
