"""A process that forks others, which use a store until they are killed.

It imports once, so that a child begins within milliseconds. Commands come as lines of JSON on the
standard input; for each, a child is forked, its process id answered, and how it ended after that.
Children write a line to the descriptor given as argument for each operation that is done.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expected_state import ABSENT, KEYS, ExpectedState, key, value

from tierstore.errors import CorruptBlockError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import FaultIO
from tierstore.testing.kills import COUNT, POINT, KillIO

if TYPE_CHECKING:
    from tierstore.io import FileIO
    from tierstore.testing.faults import Call

Command = dict[str, Any]
WRONG_BYTES, REFUSED, NEVER_KILLED = 10, 11, 12
_MOST_STEPS = 4000


def dying_io(folder: str, nth: int) -> FaultIO:
    """A seam whose process is killed at its n-th call; a write just before that is cut short."""
    io, calls = FaultIO(folder), 0

    def strike(call: Call) -> None:
        nonlocal calls
        calls += 1
        if calls == nth - 1 and call.kind == "write":
            call.limit = 100 if nth % 2 else 2000
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    io.inject("*", strike)
    return io


class Load:
    """Random operations on a store, each noted in the expected state before and after."""

    def __init__(self, command: Command, io: FileIO) -> None:
        self._options = command["options"]
        self._folder = command["folder"]
        self._io = io
        self._coin = random.Random(command["seed"])
        self._state = ExpectedState(Path(command["state"]))
        self._is_roomy = command["roomy"]
        self._store = self._open()
        _acknowledge("open")

    def _open(self) -> KeyedStore:
        return KeyedStore(self._folder, Identity(), io=self._io, **self._options)

    def run(self) -> None:
        """Operations until the process is killed, or there were too many."""
        steps = [self._put, self._delete, self._get, self._sync, self._clear, self._reopen]
        for step in self._coin.choices(steps, [60, 12, 16, 8, 1, 3], k=_MOST_STEPS):
            step()
            _acknowledge(step.__name__)
        sys.exit(NEVER_KILLED)

    def _some(self) -> list[int]:
        return self._coin.sample(range(KEYS), self._coin.randint(1, 6))

    def _put(self) -> None:
        numbers = self._some()
        versions = [self._state.next_version() for _ in numbers]
        for number, version in zip(numbers, versions, strict=True):
            self._state.begin(number, version)
        values = [value(number, version) for number, version in zip(numbers, versions, strict=True)]
        done = self._store.put_many([key(number) for number in numbers], values)
        for number, is_done in zip(numbers, done.tolist(), strict=True):
            self._state.end(number, done=is_done)

    def _delete(self) -> None:
        numbers = self._some()
        for number in numbers:
            self._state.begin(number, ABSENT)
        self._store.delete_many([key(number) for number in numbers])
        for number in numbers:
            self._state.end(number)

    def _get(self) -> None:
        numbers = self._some()
        for number, data in zip(
            numbers, self._store.get_many([key(number) for number in numbers]), strict=True
        ):
            version = self._state.committed(number)
            if data is None and (version == ABSENT or not self._is_roomy):
                continue
            if data != value(number, version):
                sys.exit(WRONG_BYTES)

    def _sync(self) -> None:
        self._store.sync()

    def _clear(self) -> None:
        for number in range(KEYS):
            self._state.begin(number, ABSENT)
        self._store.clear()
        for number in range(KEYS):
            self._state.end(number)

    def _reopen(self) -> None:
        self._store.close()
        self._store = self._open()


def _acknowledge(what: str) -> None:
    with suppress(BlockingIOError):
        os.write(int(sys.argv[1]), what.encode() + b"\n")


def load(command: Command) -> None:
    """Use a store until killed: from outside, at a named point, or at a call of the seam."""
    if command.get("nth"):
        io: FileIO = dying_io(command["folder"], command["nth"])
    else:
        point, count = command.get("point", ""), str(command.get("count", 1))
        io = KillIO({POINT: point, COUNT: count})
    Load(command, io).run()


def reopen(command: Command) -> None:
    """Open a store and close it, and be killed at a call of the seam if it comes to that."""
    io = dying_io(command["folder"], command["nth"])
    KeyedStore(command["folder"], Identity(), io=io, **command["options"]).close()


def visit(command: Command) -> None:
    """Use a damaged store: every value is what it was, or missing, and new ones can be put."""
    keys = [bytes.fromhex(name) for name in command["keys"]]
    try:
        store = KeyedStore(command["folder"], Identity(), **command["options"])
    except CorruptBlockError:
        sys.exit(REFUSED)
    for name, data in zip(keys, store.get_many(keys), strict=True):
        if data not in (None, name * 3):
            sys.exit(WRONG_BYTES)
    for _ in range(3):
        for i in range(8):
            assert store.put(b"new-%d" % i, b"new value")
        store.sync()
    store.validate()
    store.close()
    with KeyedStore(command["folder"], Identity(), **command["options"]) as store:
        if store.get(b"new-1") != b"new value":
            sys.exit(WRONG_BYTES)


def visit_flipped(command: Command) -> None:
    """`visit` copies of a store, in whose directory one bit each is flipped."""
    for at, bit in command["flips"]:
        _acknowledge(f"{at}/{bit}")
        shutil.rmtree(command["folder"], ignore_errors=True)
        shutil.copytree(command["good"], command["folder"])
        (file,) = Path(command["folder"]).glob("*/directory/data.mdb")
        content = bytearray(file.read_bytes())
        content[at] ^= 1 << bit
        file.write_bytes(content)
        visit(command)


_JOBS = {job.__name__: job for job in (load, reopen, visit, visit_flipped)}


def _warm_up() -> None:
    """Have everything imported and compiled before the first fork."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with KeyedStore(folder, Identity(), disk="2MiB", segment="64KiB") as store:
                store.put_many([b"a", bytes(100)], [b"1", b"2"])
                store.get_many([b"a", b"b"])
                store.delete(b"a")


def serve() -> None:
    """Fork a child for each command."""
    _warm_up()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _JOBS[command["job"]](command)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
