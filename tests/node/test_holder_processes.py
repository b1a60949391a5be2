"""The holder watches the processes of engines, opens the memory of idle engines, and survives what engines send."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpipe.node.holder import BEAT_S, Holder
from kvpipe.node.layout import Process
from kvpipe.node.messages import BatchAnswer, Publish, SlotBatch, Unwelcome, Welcome
from kvpipe.node.processes import checked_folder, memory_of_clients, process_of, watch
from kvpipe.node.segment import layout_of
from kvpipe.testing.waiting import eventually
from tests.node.test_holder import Caller, _hello, _holding


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return short_path / "node"


@pytest.mark.parametrize("memories", [0, 1, 2])
def test_memory_of_a_process_with_the_mark_is_found_unless_it_has_several(folder: Path, memories: int) -> None:
    """A process may use the memories of two folders. Then nobody knows which memory belongs to the folder."""
    code = f"""
from pathlib import Path
from kvpipe.node.processes import mark_client
from kvpipe.node.segment import create, layout_of
made = [create(8, 4096) for _ in range({memories})]
mark_client(Path({str(checked_folder(folder))!r}))
print("ready", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        fd = memory_of_clients(folder)
        process.kill()
    assert (fd is not None) == (memories == 1)
    if fd is not None:
        assert layout_of(fd).slots == 8
        os.close(fd)


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
