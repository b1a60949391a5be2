"""The holder watches the processes of engines, opens the memory of idle engines, and survives what engines send."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from kvpipe.node.client import NodePool
from kvpipe.node.holder import BEAT_S, Holder
from kvpipe.node.layout import Process
from kvpipe.node.messages import BatchAnswer, Publish, SlotBatch, Unwelcome, Welcome
from kvpipe.node.processes import CLIENTS, checked_folder, memory_of_clients, process_of, watch
from kvpipe.node.replica import stamp_of
from kvpipe.node.segment import layout_of
from kvpipe.testing.waiting import eventually
from tests.node.test_holder import Caller, _hello, _holding
from tests.rigs.node_engine import options

CLONE_NEWUSER, CLONE_NEWPID = 0x1000_0000, 0x2000_0000


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return short_path / "node"


MARKED = """
import ctypes, os, sys
from pathlib import Path
from kvpipe.node.processes import mark_client
from kvpipe.node.segment import create
folder, memories, reopens, flags = sys.argv[1:]
if int(flags):
    assert ctypes.CDLL(None).unshare(int(flags)) == 0
    if os.fork():
        sys.exit(os.wait()[1])
made = [create(9, 8192) for _ in range(int(memories))]
mark_client(Path(folder))
print("ready", flush=True)
while int(reopens):
    os.close(os.open(os.devnull, os.O_RDONLY))
input()
"""


@contextmanager
def _marked(folder: Path, memories: int, *, reopens: bool = False, flags: int = 0) -> Iterator[None]:
    """Run a process that has the folder's mark and `memories` memories, and `reopens` a descriptor all the time.

    `flags` names the namespaces that the process has for itself.
    """
    (checked_folder(folder) / CLIENTS).touch(0o600)
    code = [sys.executable, "-c", MARKED, str(folder), str(memories), str(int(reopens)), str(flags)]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill() if reopens else process.communicate(b"\n")


@pytest.mark.parametrize("memories", [0, 1, 2])
def test_memory_of_a_process_with_the_mark_is_found_unless_it_has_several(folder: Path, memories: int) -> None:
    """A process may use the memories of two folders. Then nobody knows which memory belongs to the folder."""
    with _marked(folder, memories):
        fd = memory_of_clients(folder)
    assert (fd is not None) == (memories == 1)
    if fd is not None:
        assert layout_of(fd).slots == 9
        os.close(fd)


@pytest.mark.parametrize("flags", [CLONE_NEWUSER, CLONE_NEWUSER | CLONE_NEWPID])
def test_memory_of_another_pid_namespace_is_not_adopted(folder: Path, flags: int) -> None:
    """The memory has the numbers that processes have in a container. Outside, these numbers name other processes."""
    with _marked(folder, 1, flags=flags), _holding(folder, adopt_s=600) as holder:
        answer, fd = Caller(holder, folder).ask(_hello())
        if flags & CLONE_NEWPID:
            assert answer == Unwelcome("an engine may still offer an earlier memory", again=True)
        else:
            assert isinstance(answer, Welcome)
            assert fd is not None
            assert layout_of(fd).slots == 9
            os.close(fd)


def test_two_memories_never_look_like_one_when_a_process_opens_and_closes_descriptors(folder: Path) -> None:
    """A descriptor that is closed during the search ends the search of no other descriptor."""
    with _marked(folder, 1, reopens=True):
        with _marked(folder, 1):
            assert [memory_of_clients(folder) for _ in range(200)] == [None] * 200
        found = list[int]()
        assert eventually(lambda: found.extend(filter(None, [memory_of_clients(folder)])) or found)  # type: ignore[func-returns-value]
        os.close(found[0])


@pytest.mark.parametrize("adopts", [False, True])
def test_process_is_watched_later_when_the_holder_had_no_descriptor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, adopts: bool
) -> None:
    """The holder has accepted the process, or has found it in the rows of an earlier holder."""
    fails = [not adopts, adopts]

    def watched(process: Process) -> int | None:
        if fails.pop(0) if fails else False:
            raise OSError(errno.EMFILE, "Too many open files")
        return watch(process)

    monkeypatch.setattr("kvpipe.node.holder.watch", watched)
    with _holding(folder) as holder:
        welcome, fd = Caller(holder, folder).ask(_hello())
        assert isinstance(welcome, Welcome)
        if not adopts:
            holder.step()
            assert process_of(os.getpid()) in holder._watched
    assert fd is not None
    second = Holder(folder, adopt_s=0, keep_s=600, fd=fd)
    assert (process_of(os.getpid()) in second._watched) is not adopts
    second.step()
    assert process_of(os.getpid()) in second._watched
    second.close()


def test_holder_without_descriptors_waits_for_the_next_beat(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that cannot be accepted stays in the queue, so the listener would wake the holder in a loop."""
    with _holding(folder) as holder:
        caller = Caller(holder, folder)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        begin_s = time.monotonic()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            for _ in range(4):
                holder.step()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert time.monotonic() - begin_s > BEAT_S
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert isinstance(caller.ask(_hello())[0], Welcome)
        assert holder._listener._rests_until_s is None


@pytest.mark.parametrize("number", [{"units": 1 << 40}, {"units": -1}, {"group": 1 << 16}, {"group": -1}])
def test_report_with_a_number_that_no_record_has_is_refused(folder: Path, number: dict[str, int]) -> None:
    """The connection ends. The holder goes on, and the slot stays granted until the engine ends."""
    with _holding(folder) as holder:
        caller = Caller(holder, folder)
        welcome, fd = caller.ask(_hello())
        assert isinstance(welcome, Welcome)
        assert fd is not None
        os.close(fd)

        def is_ready() -> bool:
            holder.step()
            return bool(holder.status().memories[0].slots["free"])

        assert eventually(is_ready)
        answer, _ = caller.ask(SlotBatch(welcome.boot, want=1))
        assert isinstance(answer, BatchAnswer)
        ((slot, generation),) = answer.granted
        report = Publish(slot, generation, number.get("group", 0), b"k", number.get("units", 1))
        assert isinstance(caller.ask(SlotBatch(welcome.boot, (report,)))[0], Unwelcome)
        assert holder.status().memories[0].slots["granted"] == 1


def _raising(number: int) -> Callable[[object], NoReturn]:
    """Return a function that fails as a system call does."""

    def fail(_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_process_that_cannot_be_watched_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder would never notice the process's end. No client stays, and the next process is accepted."""
    with _holding(folder) as holder:
        with monkeypatch.context() as patched:
            patched.setattr("kvpipe.node.holder.watch", _raising(errno.EPERM))
            answer, _ = Caller(holder, folder).ask(_hello())
        assert isinstance(answer, Unwelcome)
        assert not answer.again
        assert "cannot be watched: [Errno 1]" in answer.why
        assert not holder._has_engines
        assert isinstance(Caller(holder, folder).ask(_hello())[0], Welcome)


def test_engine_retries_when_the_holder_cannot_identify_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder lacks a descriptor for the engine's process at this moment."""
    with _holding(folder) as holder:
        monkeypatch.setattr("kvpipe.node.holder.peer_of", _raising(errno.EMFILE))
        answer, _ = Caller(holder, folder).answer()
        assert answer == Unwelcome("[Errno 24] Too many open files", again=True)


ONE_FREE = """
import os, resource
from kvpipe.node.processes import process_of, watch
parent = process_of(os.getppid())
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    os.close(held.pop())
for _ in range(2):
    try:
        print(watch(parent))
    except OSError as error:
        print(os.strerror(error.errno))
os.dup(0)
"""


def test_live_process_does_not_count_as_ended_when_descriptors_run_out() -> None:
    """The pidfd takes the last free descriptor, so the process's start time cannot be read. The pidfd is closed."""
    done = subprocess.run([sys.executable, "-c", ONE_FREE], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [os.strerror(errno.EMFILE)] * 2


def test_engine_stops_using_the_memory_when_a_holder_has_freed_its_row(folder: Path) -> None:
    """Its old leases protect nothing, so every lookup misses. The old row may belong to another engine."""
    with _holding(folder) as holder:
        pool = NodePool(options(folder))
        assert eventually(lambda: (holder.step(), pool.poll(), pool.stock.free)[-1])  # type: ignore[func-returns-value]
        assert pool.segment is not None
        assert pool.leases is not None
        stamp = stamp_of(0, int(pool.segment.generations[0]))
        pins = pool.leases.pin(stamp)
        assert pins is not None
        assert holder._memory is not None
        holder._memory.died(process_of(os.getpid()))
        assert eventually(lambda: (holder.step(), not holder.status().memories[0].clients)[-1])  # type: ignore[func-returns-value]
        assert isinstance(Caller(holder, folder).ask(_hello(2))[0], Welcome)
        pool._lose("the connection has ended")
        assert eventually(lambda: (holder.step(), pool.poll(), pool.state != "ORPHANED")[-1])  # type: ignore[func-returns-value]
        assert (pool.state, pool.stock.free) == ("STRANDED", 0)
        assert pool.leases.pin(stamp) is None
        pool.leases.unpin(pins)
        assert not any(pool.segment.leases_of(0))
        pool.close()
