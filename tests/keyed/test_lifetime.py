"""Family D of the fault cases, beginnings and ends: D7, D8, D11 to D13."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from keyed_stores import (
    KEYS,
    METHODS,
    TESTS,
    VALUES,
    Hang,
    descriptors,
    filled,
    in_child,
    open_store,
)

from tierstore.errors import ConfigError, StoreLockedError, TierOfflineError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.clock import FakeClock
from tierstore.testing.faults import FaultIO

if TYPE_CHECKING:
    from pathlib import Path


class TestLeases:
    def test_a_second_release_is_an_error(self, tmp_path: Path) -> None:
        """D7."""
        with filled(tmp_path / "s") as store:
            lease = store.lease_many(KEYS, owner="reader", seconds=9)
            lease.release()
            with pytest.raises(ConfigError, match="the lease of 'reader' was released before"):
                lease.release()
            assert store.stats().leases == 0
            assert not store.volume.records.pins.any()

    @pytest.mark.parametrize("dram", [None, "128KiB"])
    def test_views_are_of_no_use_after_the_release(self, tmp_path: Path, dram: str | None) -> None:
        """D7."""
        with filled(tmp_path / "s", dram=dram) as store:
            with store.lease_many([*KEYS, b"missing"], owner="reader", seconds=9) as lease:
                assert len(lease) == 8
                view, missing = lease.values[0], lease.values[8]
                assert missing is None
                assert view is not None
                assert view == VALUES[0]
                assert view.readonly
            with pytest.raises(ValueError, match="released memoryview"):
                bytes(view)

    def test_views_are_of_no_use_after_the_store_is_closed(self, tmp_path: Path) -> None:
        """D7."""
        store = filled(tmp_path / "s")
        lease = store.lease_many(KEYS, owner="reader", seconds=9)
        view = lease.values[0]
        assert view is not None
        store.close()
        with pytest.raises(ValueError, match="released memoryview"):
            bytes(view)
        with pytest.raises(ConfigError, match="released before"):
            lease.release()

    def test_an_array_made_from_a_view_keeps_its_bytes_as_long_as_it_lives(
        self, tmp_path: Path
    ) -> None:
        """D7. Memory that can be reached must not change, whoever forgot to give it back."""
        clock = FakeClock()
        with filled(tmp_path / "s", clock=clock) as store:
            store.get_many(KEYS)
            lease = store.lease_many(KEYS[:1], owner="reader", seconds=9)
            view = lease.values[0]
            assert view is not None
            array = np.frombuffer(view, np.uint8)
            del view
            lease.release()
            store.delete(KEYS[0])
            for number in range(60):
                store.put(b"x %d" % number, bytes(5000))
                store.get(b"x %d" % number)
            assert array.tobytes() == VALUES[0]
            assert store.stats().leases == 1
            del array
            store.put(b"y", b"1")
            assert store.stats().leases == 0
            assert not store.volume.records.pins.any()

    def test_a_lease_whose_deadline_passed_makes_room(self, tmp_path: Path) -> None:
        """D7, E9."""
        clock = FakeClock()
        with open_store(tmp_path / "s", disk="128KiB", clock=clock) as store:
            keys = [b"%d" % i for i in range(3)]
            assert store.put_many(keys, [bytes(16_000)] * 3).all()
            lease = store.lease_many(keys, owner="slow", seconds=10)
            assert not store.put(b"new", bytes(16_000))
            clock.advance(9)
            assert not store.put(b"new", bytes(16_000))
            clock.advance(1)
            assert store.put(b"new", bytes(16_000))
            assert not lease.is_live
            with pytest.raises(ConfigError, match="its deadline passed and the store needed"):
                lease.release()

    def test_a_lease_ends_its_hold_when_its_block_ends_with_an_error(self, tmp_path: Path) -> None:
        """D7."""
        with filled(tmp_path / "s") as store:
            with (
                pytest.raises(RuntimeError, match="broken"),
                store.lease_many(KEYS, owner="reader", seconds=9),
            ):
                raise RuntimeError("broken")
            assert store.stats().leases == 0


class TestBuffers:
    @pytest.mark.parametrize("dram", [None, "128KiB"])
    def test_what_was_put_stays_when_its_source_changes(
        self, tmp_path: Path, dram: str | None
    ) -> None:
        """D8."""
        with open_store(tmp_path / "s", dram=dram) as store:
            text, array = bytearray(b"before"), np.full(5000, 1, np.uint8)
            store.put_many([b"a", b"b"], [text, array])
            text[:] = b"after!"
            array[:] = 2
            assert store.get_many([b"a", b"b"]) == [b"before", bytes([1]) * 5000]

    @pytest.mark.parametrize("dram", [None, "128KiB"])
    def test_what_was_got_may_be_changed(self, tmp_path: Path, dram: str | None) -> None:
        """D8."""
        with filled(tmp_path / "s", dram=dram) as store:
            for _ in range(2):
                out = np.zeros((8, 5000), np.uint8)
                assert store.get_into(KEYS, out).tolist() == [5000] * 8
                assert [row.tobytes() for row in out] == VALUES
                out[:] = 0
            assert store.get_many(KEYS) == VALUES

    def test_leased_views_cannot_be_written(self, tmp_path: Path) -> None:
        """D8."""
        with filled(tmp_path / "s") as store:
            store.get_many(KEYS)
            with store.lease_many(KEYS, owner="reader", seconds=9) as lease:
                view = lease.values[0]
                assert view is not None
                with pytest.raises(TypeError, match="cannot modify read-only memory"):
                    view[0] = 1
                array = np.frombuffer(view, np.uint8)
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                    array.flags.writeable = True
                del array


class TestForks:
    def test_a_fork_cannot_use_the_store_and_harms_nothing(self, tmp_path: Path) -> None:
        """D11. A process with threads should not fork, so a fresh one does."""
        script = """
            import gc, os, pathlib, sys
            from keyed_stores import KEYS, METHODS, VALUES, filled, open_store
            from tierstore.errors import ConfigError
            store = filled(pathlib.Path(sys.argv[1]), threads=0)
            lease = store.lease_many(KEYS, owner="parent", seconds=99)
            child = os.fork()
            if not child:
                calls = METHODS | {"stats": lambda store: store.stats(), "len": len}
                for name, call in calls.items():
                    try:
                        call(store)
                    except ConfigError as error:
                        assert "this is a fork of it" in str(error), error
                    else:
                        os._exit(3)
                store.close()
                del store, call, lease
                gc.collect()
                sys.exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, status
            assert store.get_many(KEYS) == VALUES
            assert [bytes(view) for view in lease.values] == VALUES
            store.sync()
            assert store.put(b"new", b"1")
            store.validate()
            try:
                open_store(pathlib.Path(sys.argv[1]))
            except BlockingIOError:
                print("still locked")
            store.close()
            print("fine")
        """
        child = in_child(script, tmp_path / "s")
        assert child.stdout.splitlines() == ["still locked", "fine"], child.stderr
        assert child.stderr == ""

    def test_a_directory_can_be_opened_again_while_a_fork_of_its_user_lives(
        self, tmp_path: Path
    ) -> None:
        """D11. The lock must not stay with a child that has inherited it."""
        script = """
            import os, pathlib, sys
            from keyed_stores import filled
            store = filled(pathlib.Path(sys.argv[1]), threads=0)
            reading, writing = os.pipe()
            if not os.fork():
                os.close(writing)
                os.read(reading, 1)  # until the parent ends
                os._exit(0)
            store.close()
            with filled(pathlib.Path(sys.argv[1])) as again:
                print(len(again))
        """
        child = in_child(script, tmp_path / "s")
        assert child.stdout.split() == ["8"], child.stderr


class TestProcesses:
    def test_a_second_opener_is_told_who_has_the_directory(self, tmp_path: Path) -> None:
        """D12."""
        with filled(tmp_path / "s") as store:
            with pytest.raises(StoreLockedError, match=rf"is open in process {os.getpid()}: close"):
                open_store(tmp_path / "s")
            with pytest.raises(StoreLockedError, match="one process at a time"):
                open_store(tmp_path / "s", read_only=True)
            assert store.get_many(KEYS) == VALUES
        open_store(tmp_path / "s").close()

    def test_a_killed_process_leaves_a_directory_that_opens(self, tmp_path: Path) -> None:
        """D12."""
        script = """
            import pathlib, signal, sys
            from keyed_stores import filled
            store = filled(pathlib.Path(sys.argv[1]))
            print("ready", flush=True)
            signal.pause()
        """
        holder = subprocess.Popen(
            [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path / "s")],
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])},
        )  # fmt: skip
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            with pytest.raises(StoreLockedError, match=f"is open in process {holder.pid}"):
                open_store(tmp_path / "s")
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES
            assert store.check() == []

    def test_a_store_for_reading_keeps_writers_out(self, tmp_path: Path) -> None:
        """D12."""
        filled(tmp_path / "s").close()
        with (
            open_store(tmp_path / "s", read_only=True),
            pytest.raises(StoreLockedError, match="is open in process"),
        ):
            open_store(tmp_path / "s")

    def test_namespaces_of_one_directory_are_apart(self, tmp_path: Path) -> None:
        """D12."""
        other = Identity(model="other")
        with (
            filled(tmp_path / "s") as one,
            KeyedStore(tmp_path / "s", other, disk="512KiB", segment="64KiB") as two,
        ):
            assert two.get_many(KEYS) == [None] * 8
            two.put(KEYS[0], b"other")
            two.clear()
            assert one.get_many(KEYS) == VALUES


class TestClosing:
    def test_a_second_close_does_nothing(self, tmp_path: Path) -> None:
        """D13."""
        store = filled(tmp_path / "s")
        store.close()
        store.close()
        with store:
            pass
        assert store.is_closed
        assert descriptors(tmp_path) == set()

    @pytest.mark.parametrize("name", METHODS)
    def test_a_closed_store_says_so(self, tmp_path: Path, name: str) -> None:
        """D13."""
        store = filled(tmp_path / "s")
        store.close()
        with pytest.raises(ConfigError, match="the store is closed: open it again"):
            METHODS[name](store)
        assert store.stats().records == 8

    @pytest.mark.parametrize("threads", [0, 4])
    def test_a_store_may_be_closed_while_others_use_it(self, tmp_path: Path, threads: int) -> None:
        """D13. Their calls finish, or are refused; nobody waits for ever."""
        store = filled(tmp_path / "s", threads=threads)
        begun, wrong = threading.Barrier(7), list[object]()

        def use(thread: int) -> None:
            begun.wait()
            for step in range(100_000):
                key = b"%d %d" % (thread, step % 50)
                try:
                    if step % 5 == 0:
                        store.put(key, key * 100)
                    elif step % 7 == 0:
                        store.prefetch([key])
                    elif store.get(key) not in (None, key * 100):
                        wrong.append(key)
                except ConfigError:
                    return
                except MemoryError:  # enough prefetches are under way
                    continue
            wrong.append("the store was never closed")

        with ThreadPoolExecutor(6) as pool:
            users = [pool.submit(use, i) for i in range(6)]
            begun.wait()
            for _ in range(20):
                store.get_many(KEYS)
            store.close()
            for user in users:
                user.result(60)
        assert wrong == []
        assert descriptors(tmp_path) == set()
        with open_store(tmp_path / "s") as again:
            again.validate()
            for key in again:
                value = again.get(key)
                assert value == (VALUES[int(key[4:])] if key in KEYS else key * 100)

    def test_closing_waits_no_longer_than_its_deadline_for_a_read_that_hangs(
        self, tmp_path: Path
    ) -> None:
        """D13, C13."""
        io, hang = FaultIO(tmp_path), Hang()
        store = filled(tmp_path / "s", io=io)
        io.inject("read", hang.effect, nth=1)
        reader = threading.Thread(target=lambda: store.get(KEYS[0]), daemon=True)
        reader.start()
        hang.wait()
        with suppress(TierOfflineError):
            store.close(deadline=0.2)
        hang.release()
        reader.join(60)
        assert not reader.is_alive()
        for thread in threading.enumerate():
            if thread.name == "tierstore-close":
                thread.join(60)
        with open_store(tmp_path / "s") as again:
            assert again.get_many(KEYS) == VALUES

    def test_a_store_that_is_forgotten_gives_its_directory_up(self, tmp_path: Path) -> None:
        """D13. Without a sync, as after a kill."""
        store = filled(tmp_path / "s")
        store.get_many(KEYS)
        assert store.prefetch(KEYS).wait(60)
        forgotten = weakref.ref(store)
        del store
        gc.collect()
        assert forgotten() is None
        assert descriptors(tmp_path) == set()
        with open_store(tmp_path / "s") as again:
            assert again.get_many(KEYS) == VALUES

    def test_forgotten_stores_leave_no_threads(self, tmp_path: Path) -> None:
        """D13."""
        before = set(threading.enumerate())  # Kernels keep threads, too, and for good.
        store = filled(tmp_path / "s")
        assert store.prefetch(KEYS).wait(60)
        ours = [t for t in set(threading.enumerate()) - before if t.name.startswith("tierstore-")]
        assert ours
        del store
        gc.collect()
        for thread in ours:
            thread.join(60)
            assert not thread.is_alive()

    def test_an_interpreter_that_ends_with_an_open_store_is_silent(self, tmp_path: Path) -> None:
        """D13."""
        script = """
            import pathlib, sys
            from keyed_stores import KEYS, filled
            store = filled(pathlib.Path(sys.argv[1]))
            prefetches = [store.prefetch(KEYS) for _ in range(60)]
            lease = store.lease_many(KEYS, owner="test", seconds=99)
            view = lease.values[0]
            store.sync()
            print("done")
        """
        for number in range(2):
            child = in_child(script, tmp_path / f"s{number}")
            assert (child.returncode, child.stdout, child.stderr) == (0, "done\n", "")
            with open_store(tmp_path / f"s{number}") as store:
                assert store.get_many(KEYS) == VALUES

    def test_the_end_of_a_block_closes_the_store_even_after_an_error(self, tmp_path: Path) -> None:
        """D13."""
        with pytest.raises(RuntimeError, match="broken"), filled(tmp_path / "s") as store:
            raise RuntimeError("broken")
        assert store.is_closed
        assert descriptors(tmp_path) == set()

    def test_an_interrupt_in_the_middle_of_a_put_leaves_the_store_in_order(
        self, tmp_path: Path
    ) -> None:
        """D13."""
        io = FaultIO(tmp_path)
        with filled(tmp_path / "s", io=io) as store:
            free = len(store.volume._space.all_free())

            def interrupt(call: object) -> None:
                raise KeyboardInterrupt

            io.inject("reached", interrupt, name="put.after_payload", nth=1)
            with pytest.raises(KeyboardInterrupt):
                store.put(b"new", VALUES[0])
            assert len(store.volume._space.all_free()) == free
            assert not store.volume.records.pins.any()
            store.validate()
            assert store.put(b"new", VALUES[0])
            assert store.get_many([*KEYS, b"new"]) == [*VALUES, VALUES[0]]

    def test_an_interrupt_in_the_middle_of_a_get_keeps_buffers_that_are_still_written_to(
        self, tmp_path: Path
    ) -> None:
        """D13."""
        io, hang = FaultIO(tmp_path), Hang()
        with filled(tmp_path / "s", io=io, dram=None, threads=1) as store:
            staging = store._loader._staging
            count = staging.free
            io.inject("read", hang.effect, nth=1)

            def interrupt() -> None:
                hang.wait()
                os.kill(os.getpid(), signal.SIGINT)

            with ThreadPoolExecutor(1) as pool:
                pool.submit(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    store.get_many(KEYS, deadline=0.5)
            assert staging.free < count
            hang.release()
            assert store.get_many(KEYS) == VALUES
            assert staging.free == count
            assert not store.volume.records.pins.any()
