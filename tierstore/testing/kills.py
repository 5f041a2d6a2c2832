"""Processes that die at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING

from tierstore.io import SAFE, FileIO

if TYPE_CHECKING:
    from collections.abc import Mapping

POINT = "TIERSTORE_KILL_POINT"
COUNT = "TIERSTORE_KILL_COUNT"
LOG = "TIERSTORE_KILL_LOG"


class KillIO(FileIO):
    """The real seam, in a process that kills itself at a point of an operation.

    ``TIERSTORE_KILL_POINT`` names the point (none: the process lives) and
    ``TIERSTORE_KILL_COUNT`` the arrival there, 1 by default. To the file ``TIERSTORE_KILL_LOG``
    the name of each point is added, one a line, when it is first reached: what is killed later
    still says where it had been. `points` counts arrivals by name.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.points: Counter[str] = Counter()
        self._point = environment.get(POINT)
        self._count = int(environment.get(COUNT, "1"))
        self._log = environment.get(LOG)
        self._lock = threading.Lock()

    def reached(self, point: str) -> None:
        with self._lock:
            self.points[point] += 1
            count = self.points[point]
            if count == 1 and self._log:
                self._note(self._log, point)
        if point == self._point and count == self._count:
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, log: str, point: str) -> None:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | SAFE, 0o600)
        try:
            os.write(fd, f"{point}\n".encode())
        finally:
            os.close(fd)
