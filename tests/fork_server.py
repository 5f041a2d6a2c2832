"""Starts tests/keyed/kill_child.py and has it fork children, to be killed or to die."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

_TESTS = Path(__file__).parent
_SCRIPT = _TESTS / "keyed" / "kill_child.py"


class ForkServer:
    """A context manager; inside it, `run` has children do a job.

    acknowledged: lines that the latest child wrote, one for each operation that was done.
    """

    def __init__(self) -> None:
        self.acknowledged: list[str] = []

    def __enter__(self) -> Self:
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        path = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
        # Without buffers, so that `select` knows of every line that was not read.
        self._server = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(write_end)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": ""},
            pass_fds=[write_end],
        )
        os.close(write_end)
        assert self._line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        os.close(self._read_end)

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().decode().strip()

    def run(
        self,
        job: str,
        *,
        kill_after: Callable[[], tuple[int, float]] | None = None,
        **command: object,
    ) -> int:
        """Have a child do a job; how it ended: its exit code, or minus the signal.

        kill_after: operations to wait for, and the seconds after that at which to kill it.
        """
        assert self._server.stdin is not None
        self.acknowledged = []
        self._server.stdin.write(json.dumps({"job": job, **command}).encode() + b"\n")
        child = int(self._line())
        if kill_after is not None:
            self._kill(child, *kill_after())
        code = int(self._line())
        self._collect()
        return code

    def _kill(self, child: int, operations: int, seconds: float) -> None:
        assert self._server.stdout is not None
        while len(self.acknowledged) < operations and not self._has_ended(0):
            select.select([self._read_end, self._server.stdout.fileno()], [], [])
            self._collect()
        if not self._has_ended(seconds):
            os.kill(child, signal.SIGKILL)

    def _has_ended(self, seconds: float) -> bool:
        """Whether the child comes to an end of its own within that time."""
        assert self._server.stdout is not None
        return bool(select.select([self._server.stdout], [], [], seconds)[0])

    def _collect(self) -> None:
        while select.select([self._read_end], [], [], 0)[0]:
            data = os.read(self._read_end, 1 << 16)
            if not data:
                return
            self.acknowledged.extend(data.decode().split())
