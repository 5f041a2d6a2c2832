"""Real Redis servers on this machine for tests; skipped where the program is missing."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TRIES = 5
_SLOTS = 16384


class Server:
    """A redis-server on a port that was free, without persistence; it can be killed and restarted.

    It also listens on the socket ``redis.sock`` in `folder`, whose path must be short.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        for _ in range(_TRIES):
            self.port = free_port()
            if self.start():
                return
        pytest.fail(f"redis-server does not start in {folder}")

    def start(self) -> bool:
        """Whether it serves now."""
        command = [
            program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self.folder), "--unixsocket", "redis.sock",
            *self._options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        is_ready = any("Ready to accept connections" in line for line in self.process.stdout)
        self.process.stdout.close()
        return is_ready

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Any:  # noqa: ANN401 (its types know text only)
        """A plain `redis.Redis`, to look and to plant faults."""
        import redis

        return redis.Redis(port=self.port)


def program() -> str:
    """The path of redis-server; skips the test where there is none, or no redis-py."""
    pytest.importorskip("redis")
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def cluster_of_three(folder: Path) -> Iterator[list[Server]]:
    """Three masters that share all slots."""
    nodes: list[Server] = []
    try:
        for number in range(3):
            (folder / str(number)).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            nodes.append(Server(folder / str(number), *options))
        _join(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _join(nodes: list[Server]) -> None:
    clients = [node.client() for node in nodes]
    edges = [i * _SLOTS // len(nodes) for i in range(len(nodes) + 1)]
    for i, client in enumerate(clients):
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        client.execute_command("CLUSTER ADDSLOTS", *range(edges[i], edges[i + 1]))
        for node in nodes[:i]:
            bus = int(node.client().config_get("cluster-port")["cluster-port"])
            client.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
    pause = threading.Event()
    for _ in range(1500):
        if all(map(_is_whole, nodes)):
            return
        pause.wait(0.02)
    pytest.fail("the cluster does not come up")


def _is_whole(node: Server) -> bool:
    state = node.client().execute_command("CLUSTER INFO")
    return bool(state["cluster_state"] == "ok" and state["cluster_known_nodes"] == "3")
