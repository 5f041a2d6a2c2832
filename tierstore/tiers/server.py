"""A Redis server or cluster as the tiers on it see one: bounded calls and errors that say why."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tierstore.errors import ConfigError, MissingExtraError, TierOfflineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from types import ModuleType

T = TypeVar("T")

Command = tuple[object, ...]
"""Words of a command: its name and arguments."""

CHECK_BYTES = 16
"""Of a checksum behind a value."""
BATCH_BYTES = 1 << 20
BATCH_SLOTS = 256

_SCHEMES = {
    "redis": ("redis", False),
    "rediss": ("rediss", False),
    "unix": ("unix", False),
    "redis+cluster": ("redis", True),
    "rediss+cluster": ("rediss", True),
}
_READ_BYTES = 1 << 18


class RedisServer:
    """Runs batches of commands in a few threads, each on a connection of its own.

    Nothing is connected before the first command. Every wait for the server ends after `timeout`
    seconds; a command that failed to arrive is sent once more.

    ConfigError for a URL that cannot be one, MissingExtraError without the extra ``redis``.
    """

    def __init__(self, url: str, name: str, timeout: float, connections: int) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in _SCHEMES or not rest:
            raise ConfigError(
                f"{name}: the URL of its server begins with {scheme!r}: expected one of "
                f"{', '.join(f'{known}://' for known in _SCHEMES)}"
            )
        if not timeout > 0 or connections < 1:
            raise ConfigError(
                f"{name}: timeout={timeout!r}, connections={connections!r}: expected seconds "
                "above 0 and at least 1 connection"
            )
        self._redis = _redis()
        self.name = name
        scheme, self.is_cluster = _SCHEMES[scheme]
        self._url, self._timeout = f"{scheme}://{rest}", timeout
        self.place = f"Redis{' cluster' if self.is_cluster else ''} at {_place(self._url, name)}"
        """What it is and where, without secrets."""
        self._client: Any = None if self.is_cluster else self._connect()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix=f"tierstore-{name}")

    def _connect(self) -> Any:  # noqa: ANN401 (of a package that need not be there)
        redis = self._redis
        make = redis.cluster.RedisCluster if self.is_cluster else redis.Redis
        try:
            return make.from_url(
                self._url,
                socket_timeout=self._timeout,
                socket_connect_timeout=self._timeout,
                socket_read_size=_READ_BYTES,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),
            )
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}: correct the URL of its server") from error

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """The reply to each command, sent together; one that was refused has its error as reply.

        TierOfflineError if the server cannot be reached or is not ready to serve.
        """
        redis = self._redis
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            raise self._offline(error) from error
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, redis.ResponseError):
                raise self._offline(reply) from reply
        return replies

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        """Keys that begin with `prefix`, which has no wildcards, on every node.

        TierOfflineError as for `run`.
        """
        redis = self._redis
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
            yield from self._client.scan_iter(match=prefix + b"*", count=1000)
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            raise self._offline(error) from error

    def is_full(self, reply: object) -> bool:
        """Whether a command was refused for want of the server's memory."""
        return isinstance(reply, self._redis.exceptions.OutOfMemoryError)

    def check(self, reply: object) -> None:
        """TierOfflineError if a command was refused."""
        if isinstance(reply, Exception):
            raise TierOfflineError(
                errno.EIO, f"{self.name}: {self.place} refused a command: {reply}"
            ) from reply

    def _offline(self, error: Exception) -> TierOfflineError:
        is_late = isinstance(error, self._redis.TimeoutError)
        return TierOfflineError(
            errno.ETIMEDOUT if is_late else errno.ECONNREFUSED,
            f"{self.name}: {self.place} does not serve ({error}): see that it runs and can be "
            f"reached from here, or leave this tier out",
        )

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Do that in one of the threads."""
        return self._threads.submit(work)

    def close(self) -> None:
        """Finish what was started, and disconnect; a second call does nothing."""
        self._threads.shutdown()
        if self._client is not None:
            self._client.close()


def _redis() -> ModuleType:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.exceptions
        import redis.retry
    except ImportError as error:
        raise MissingExtraError("redis", "redis", "a tier on a Redis server") from error
    return redis


def _place(url: str, name: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError as error:
        raise ConfigError(f"{name}: {error}: correct the URL of its server") from error
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{port}"


class Transfer:
    """Batches under way, and what is left to do when all have arrived."""

    def __init__(
        self, under_way: list[Future[None]], finish: Callable[[], None] | None = None
    ) -> None:
        self._under_way, self._finish = under_way, finish

    def wait(self) -> None:
        """Return when all is done; raises what a batch raised."""
        wait(self._under_way)
        for future in self._under_way:
            future.result()
        if self._finish is not None:
            self._finish()


def in_batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Items in groups of at most so many."""
    return (items[first : first + most] for first in range(0, len(items), most))


def check_ttl(name: str, ttl: float) -> None:
    """ConfigError if that is no time to live, in seconds."""
    if not 0.001 <= ttl < 1e9:
        raise ConfigError(f"{name}: ttl={ttl!r}: expected seconds, from 0.001 to below 1e9")
