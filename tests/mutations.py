"""Breaks the storage engine on purpose, one way at a time, and demands that its tests notice.

    python tests/mutations.py            all of them; about ten minutes
    python tests/mutations.py NAME ...   those whose names contain one of these

Each mutation is made in an installed copy of the package, and the tests that should see it run
against that copy. One that survives means that a test is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


class Mutation(NamedTuple):
    """Text to replace in a file of the package, once each, and the tests that must then fail."""

    name: str
    file: str
    changes: list[tuple[str, str]]
    tests: list[str]


FAULTS, SWEEP = "tests/keyed/test_faults.py", "tests/keyed/test_sweep.py"
MACHINE, DAMAGE = "tests/keyed/test_machine.py", "tests/keyed/test_damage.py"
CONCURRENCY, LIFETIME = "tests/keyed/test_concurrency.py", "tests/keyed/test_lifetime.py"
ARGUMENTS, SOAK = "tests/keyed/test_arguments.py", "tests/keyed/test_soak.py"
POWER = "tests/keyed/test_power_loss.py"

MUTATIONS = [
    Mutation(
        "skip fsync", "volume/segment.py",
        [("        self._io.sync(self._fd)\n", "        pass\n")],
        [FAULTS],
    ),
    Mutation(
        "skip the fsync of a directory", "volume/files.py",
        [("            if missing > 0:\n                self._io.sync_directory(self.folder)\n",
          "")],
        [FAULTS, POWER],
    ),
    Mutation(
        "skip the fsync of the directory of IDENTITY", "volume/namespace.py",
        [("    io.rename(fresh, path)\n    io.sync_directory(directory)\n",
          "    io.rename(fresh, path)\n")],
        [POWER, FAULTS, MACHINE],
    ),
    Mutation(
        "rename before fsync", "volume/namespace.py",
        [("        write_fully(io, fd, [facts.encode()], 0)\n        io.sync(fd)\n",
          "        write_fully(io, fd, [facts.encode()], 0)\n"),
         ("    io.rename(fresh, path)\n    io.sync_directory(directory)\n",
          ("    io.rename(fresh, path)\n    io.sync_directory(directory)\n"
          "    fd = io.open(path, os.O_WRONLY)\n    io.sync(fd)\n    io.close(fd)\n"))],
        [POWER, FAULTS, MACHINE],
    ),
    Mutation(
        "skip the payload's checksum", "volume/files.py",
        [("!= row[8:24]:", "== b\"\":")],
        [DAMAGE, FAULTS, MACHINE],
    ),
    Mutation(
        "checksum the payload only, not what its row says", "volume/format.py",
        [("    return xxhash.xxh3_128_digest(digest + binding + row[:8] + row[24:35] + row[36:88])",
          "    return digest")],
        [ARGUMENTS, DAMAGE],
    ),
    Mutation(
        "believe rows without their check", "volume/opening.py",
        [("        is_bad[i] = row_check(row, segment.binding(place)) != int(rows[\"check\"][i])\n",
          "")],
        [DAMAGE, POWER],
    ),
    Mutation(
        "retry a failed fsync", "volume/segment.py",
        [("        self._io.sync(self._fd)\n",
          ("        try:\n            self._io.sync(self._fd)\n        except OSError:\n"
          "            self._io.sync(self._fd)\n"))],
        [FAULTS],
    ),
    Mutation(
        "go on with a file whose fsync failed", "volume/syncing.py",
        [(("                if self._files.by_number.get(segment.number) is segment:\n"
          "                    self.replace(segment)\n"), "                pass\n")],
        [FAULTS],
    ),
    Mutation(
        "ignore short writes", "io.py",
        [("            raise OSError(errno.EIO, f\"nothing could be written at {offset}\")\n",
          ("            raise OSError(errno.EIO, f\"nothing could be written at {offset}\")\n"
          "        return\n"))],
        [FAULTS, SWEEP],
    ),
    Mutation(
        "forget the tombstone", "volume/volume.py",
        [("        try:\n            self.write_rows(places)\n        finally:\n",
          "        if True:\n")],
        [CONCURRENCY, SWEEP, MACHINE],
    ),
    Mutation(
        "publish before the data is there", "volume/writing.py",
        [("            failed = self._files.write(runs, pieces)\n",
          "            failed = list[int]()\n"),
         ("                return self._publish(keys, places, rows, epoch)\n",
          ("                done = self._publish(keys, places, rows, epoch)\n"
          "            self._files.write(runs, pieces)\n            return done\n"))],
        [FAULTS, CONCURRENCY, SOAK],
    ),
    Mutation(
        "evict what is pinned", "volume/space.py",
        [("np.flatnonzero(is_live & (records.pins[run] == 0))", "np.flatnonzero(is_live)")],
        [CONCURRENCY, MACHINE],
    ),
    Mutation(
        "empty files of which something is pinned", "volume/space.py",
        [("        return bool(self._records.pins[segment.places].any())", "        return False")],
        [CONCURRENCY, MACHINE],
    ),
    Mutation(
        "drop copies in memory that are leased", "hot.py",
        [("unpinned: Pointers = linked[self._records.pins[linked] == 0]",
          "unpinned: Pointers = linked")],
        [LIFETIME, MACHINE],
    ),
    Mutation(
        "one segment too many", "volume/capacity.py",
        [("    if most < 1:\n", "    most += 1\n    if most < 1:\n")],
        [ARGUMENTS, MACHINE],
    ),
    Mutation(
        "evict the most recently used", "volume/space.py",
        [("np.argpartition(self._records.used[own], count)",
          "np.argpartition(-self._records.used[own].astype(np.int64), count)")],
        [ARGUMENTS],
    ),
    Mutation(
        "empty the file that was used last", "volume/space.py",
        [("        latest, _, segment = min(candidates)\n",
          "        latest, _, segment = max(candidates)\n")],
        [ARGUMENTS],
    ),
    Mutation(
        "compare only the length of keys after a hash hit", "kernels/keys.py",
        [("        if row[FIELD + i] != field[i]:\n            return False\n",
          "        if row[FIELD + i] != field[i]:\n            return True\n")],
        [ARGUMENTS, MACHINE],
    ),
    Mutation(
        "compare only the row's part of a long key", "volume/records.py",
        [("self.long_keys.get(int(places[position])) != key", "False")],
        [DAMAGE, ARGUMENTS],
    ),
    Mutation(
        "let the put that arrives last win", "volume/writing.py",
        [("        is_late[is_late] = sequences[current[is_late]] > rows[\"sequence\"][is_late]\n",
          "        is_late[:] = False\n")],
        [CONCURRENCY],
    ),
    Mutation(
        "move values under new sequences", "volume/syncing.py",
        [("                sequences=[int(row[\"sequence\"])],\n", "")],
        [CONCURRENCY],
    ),
    Mutation(
        "publish into a store that was cleared meanwhile", "volume/writing.py",
        [("        if self._volume.is_closed or self._volume.facts.epoch != epoch:\n",
          "        if self._volume.is_closed:\n")],
        [CONCURRENCY],
    ),
    Mutation(
        "show a put that came too late", "volume/writing.py",
        [("if until is not None and time.monotonic() > until:\n", "if False:\n")],
        [FAULTS],
    ),
    Mutation(
        "use the buffer of a late read at once", "aligned.py",
        [(("            if isinstance(outcome, LateReadError):\n"
          "                outcome.when_settled("),
          "            if False:\n                outcome.when_settled(")],
        [FAULTS],
    ),
    Mutation(
        "forget that a clear failed half way", "volume/syncing.py",
        [("        if not self.is_identity_sure:", "        if False:")],
        [FAULTS],
    ),
    Mutation(
        "trust what a killed process left as if it were durable", "volume/opening.py",
        [("        segment.is_dirty = not self.is_clean\n", "")],
        [FAULTS],
    ),
    Mutation(
        "count pins modulo 65,536", "volume/records.py",
        [("pins: npt.NDArray[np.uint32] = np.zeros(places, np.uint32)",
          "pins = np.zeros(places, np.uint16)")],
        [ARGUMENTS],
    ),
    Mutation(
        "leave the lock to children", "volume/lock.py",
        [("            fcntl.flock(self._fd, fcntl.LOCK_UN)", "            pass")],
        [LIFETIME],
    ),
]  # fmt: skip


class Outcome(NamedTuple):
    """What became of a mutation; a test that failed, if one did."""

    verdict: str
    witness: str
    seconds: float


def install(target: Path) -> None:
    """An installed copy of the package, which can be changed."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--target", str(target), str(ROOT),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def mutate(package: Path, mutation: Mutation) -> None:
    """Make the changes. ValueError if the code is not what the mutation expects."""
    file = package / "tierstore" / mutation.file
    text = file.read_text()
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.name}: {text.count(old)} matches in {file.name}: {old!r}")
        text = text.replace(old, new)
    file.write_text(text)


def run_tests(package: Path, tests: list[str]) -> tuple[int, str]:
    """Exit status of the tests against that package, and the first that failed."""
    command = [
        os.path.join(os.path.dirname(sys.executable), "pytest"), "-x", "-q", "--no-header",
        "-p", "no:cacheprovider", "--timeout", "60", "--show-capture=no", "--tb=line",
        *[test for test in tests if (ROOT / test).exists()],
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(package), "MUTATED": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, "the tests hang"
    failed = re.search(r"^(?:FAILED|ERROR) (.+)", done.stdout, re.MULTILINE)
    hung = "a test hangs" if "Timeout" in done.stdout else done.stdout[-200:]
    return done.returncode, failed[1].split("::", 1)[-1] if failed else hung


def judge(clean: Path, mutation: Mutation) -> Outcome:
    """Apply a mutation to a copy and run its tests, one file after the other."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "package"
        shutil.copytree(clean, package)
        mutate(package, mutation)
        for test in mutation.tests:
            status, witness = run_tests(package, [test])
            if status:
                return Outcome("killed", witness, time.monotonic() - began)
    return Outcome("SURVIVED", "", time.monotonic() - began)


def main(names: list[str]) -> int:
    """Number of mutations that survive."""
    chosen = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder)
        install(clean)
        for test in sorted({test for mutation in chosen for test in mutation.tests}):
            status, witness = run_tests(clean, [test])
            if status:
                sys.exit(f"{test} fails without a mutation: {witness}")
        for mutation in chosen:
            outcome = judge(clean, mutation)
            survived += outcome.verdict == "SURVIVED"
            print(
                f"{outcome.verdict:9} {mutation.name:58} {outcome.seconds:5.0f} s  "
                f"{outcome.witness.split(' - ')[0]}",
                flush=True,
            )
    print(f"{len(chosen) - survived} of {len(chosen)} mutations were noticed")
    return survived


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
