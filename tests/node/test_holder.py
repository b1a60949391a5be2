"""The holder refuses connections that do not fit, with one sentence each, and keeps its memory."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.errors import ConfigError
from kvpipe.node import messages
from kvpipe.node.client import NodePool, RankMemory
from kvpipe.node.connect import NoHolderError, RefusedByHolderError, greet, reach
from kvpipe.node.holder import Holder
from kvpipe.node.layout import VERSION
from kvpipe.node.messages import Goodbye, Hello, SlotBatch, Unwelcome, Welcome
from kvpipe.node.processes import SOCKET, checked_folder, folder_of_user, mark_client, process_of, watch
from kvpipe.node.segment import create
from kvpipe.testing.waiting import eventually
from tests.rigs.node_engine import NAMESPACE, SLOT_BYTES, SLOTS, options


def _hello(number: int = 1, *, version: int = VERSION, slot_bytes: int = SLOT_BYTES, **more: Any) -> Hello:
    return Hello(version, "scheduler", b"%016d" % number, NAMESPACE, SLOTS, slot_bytes, **more)


class Caller:
    """A connection to a holder in this process. The connection makes the holder's steps."""

    def __init__(self, holder: Holder, folder: Path) -> None:
        self._holder = holder
        self.wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.wire.connect(str(folder / SOCKET))
        self.wire.setblocking(False)

    def ask(self, message: Hello | SlotBatch, fd: int | None = None) -> tuple[messages.ToEngine, int | None]:
        """Send a message. Return the answer, and the descriptor that was sent with the answer."""
        messages.send(self.wire, message, [] if fd is None else [fd])
        return self.answer()

    def answer(self) -> tuple[messages.ToEngine, int | None]:
        """Return the next answer. Raises OSError if the connection has ended."""
        for _ in range(20):
            self._holder.step()
            try:
                return messages.receive_by_engine(self.wire)
            except BlockingIOError:
                continue
        raise TimeoutError


def _token(holder: Holder) -> bytes:
    assert holder._memory is not None
    return holder._memory.layout.token


@contextmanager
def _holding(folder: Path, *, adopt_s: float = 0, policy: str = "") -> Iterator[Holder]:
    holder = Holder(folder, adopt_s=adopt_s, keep_s=600, policy=policy)
    try:
        yield holder
    finally:
        holder.close()


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return short_path / "node"


def test_engine_of_another_version_is_refused(folder: Path) -> None:
    """A holder with engines refuses an engine of another version, and keeps running."""
    with _holding(folder) as holder:
        assert isinstance(Caller(holder, folder).ask(_hello())[0], Welcome)
        answer, _ = Caller(holder, folder).ask(_hello(2, version=VERSION + 1))
        assert isinstance(answer, Unwelcome)
        assert f"version {VERSION}" in answer.why
        assert not holder._is_unused()


def test_holder_without_engines_makes_room_for_another_version(folder: Path) -> None:
    """No engine uses the memory, so replacing the memory loses nothing."""
    with _holding(folder) as holder:
        Caller(holder, folder).ask(_hello(version=VERSION + 1))
        assert holder._is_unused()


def test_engine_with_slots_that_do_not_fit_is_refused(folder: Path) -> None:
    """Slots of a second size may be too small or too few. The message names both sizes."""
    with _holding(folder) as holder:
        Caller(holder, folder).ask(_hello())
        for slot_bytes in (SLOTS * SLOT_BYTES, SLOT_BYTES - 1):
            answer, _ = Caller(holder, folder).ask(_hello(2, slot_bytes=slot_bytes))
            assert isinstance(answer, Unwelcome)
            assert answer.why.startswith(
                f"the node's memory has slots of {SLOT_BYTES} bytes, this engine needs {slot_bytes};"
            )
            assert not answer.again


def test_engine_with_other_slots_uses_the_same_memory(folder: Path) -> None:
    """The answer names the region of slots of the engine's size. The status has both sizes."""
    with _holding(folder) as holder:
        answers = [Caller(holder, folder).ask(_hello(n, slot_bytes=n * SLOT_BYTES)) for n in (1, 2)]
        inodes = {os.fstat(fd).st_ino for _, fd in answers if fd is not None}
        assert len(inodes) == 1
        assert [answer.region for answer, _ in answers if isinstance(answer, Welcome)] == [0, 1]
        memories = holder.status().memories
        assert [one.slot_bytes for one in memories] == [SLOT_BYTES, 2 * SLOT_BYTES]
        assert [one.slots["slots"] for one in memories] == [SLOTS, SLOTS // 2]
        for _, fd in answers:
            assert fd is not None
            os.close(fd)


def _unused_memory(holder: Holder, folder: Path) -> int:
    """Let an engine make the memory, and then end. Returns the memory's inode."""
    first = Caller(holder, folder)
    welcome, fd = first.ask(_hello())
    assert isinstance(welcome, Welcome)
    assert fd is not None
    inode = os.fstat(fd).st_ino
    os.close(fd)
    messages.send(first.wire, Goodbye(welcome.boot))
    holder.step()
    return inode


def test_unused_memory_without_room_for_other_slots_is_replaced(folder: Path) -> None:
    """The new engine does not wait until the memory has been unused for `keep_s`. The old memory is freed at once."""
    with _holding(folder) as holder:
        old = _unused_memory(holder, folder)
        offered = _hello(2, slot_bytes=SLOTS * SLOT_BYTES, segment=b"s" * 16)
        assert isinstance(Caller(holder, folder).ask(offered)[0], Unwelcome)
        assert isinstance(Caller(holder, folder).ask(_hello(3, slot_bytes=SLOTS * SLOT_BYTES))[0], Welcome)
        assert [memory.slot_bytes for memory in holder.status().memories] == [SLOTS * SLOT_BYTES]
        assert isinstance(Caller(holder, folder).ask(_hello(4, slot_bytes=SLOT_BYTES - 1))[0], Unwelcome)
        assert f" {old} " not in Path("/proc/self/maps").read_text()
        still = [one.stat().st_ino for one in Path("/proc/self/fd").iterdir() if one.exists()]
        assert old not in still


def test_memory_that_cannot_be_replaced_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine with other slots is refused. Engines with the old slots still use the memory."""

    def fails(*_: object) -> None:
        raise OSError("too many open files")

    with _holding(folder) as holder:
        memory = _unused_memory(holder, folder)
        with monkeypatch.context() as patched:
            patched.setattr("kvpipe.node.memory.lock", fails)
            assert isinstance(Caller(holder, folder).ask(_hello(2, slot_bytes=SLOTS * SLOT_BYTES))[0], Unwelcome)
        answer, fd = Caller(holder, folder).ask(_hello(3))
        assert isinstance(answer, Welcome)
        assert fd is not None
        assert os.fstat(fd).st_ino == memory
        os.close(fd)


def test_engine_with_another_memory_is_refused(folder: Path) -> None:
    """The engine brings a memory whose slots differ from those of the holder's memory."""
    with _holding(folder) as holder:
        Caller(holder, folder).ask(_hello())
        answer, _ = Caller(holder, folder).ask(_hello(2, segment=b"x" * 16))
        assert isinstance(answer, Unwelcome)
        assert not answer.again


def test_garbage_ends_the_connection_only(folder: Path) -> None:
    """Garbage from one connection does not affect other engines."""
    with _holding(folder) as holder:
        caller, hostile = Caller(holder, folder), Caller(holder, folder)
        caller.ask(_hello())
        hostile.wire.send(b"\xff" * 100)
        assert isinstance(hostile.answer()[0], Unwelcome)
        with pytest.raises(ConnectionResetError):
            hostile.answer()
        assert isinstance(Caller(holder, folder).ask(_hello(2))[0], Welcome)


def test_batch_with_an_old_boot_token_ends_the_connection(folder: Path) -> None:
    """The batch has the boot token of another holder, so the engine must first greet this holder."""
    with _holding(folder) as holder:
        caller = Caller(holder, folder)
        welcome, _ = caller.ask(_hello())
        assert isinstance(welcome, Welcome)
        with pytest.raises(ConnectionResetError):
            caller.ask(SlotBatch(welcome.boot + 2, want=1))
        assert holder.status().memories[0].slots["granted"] == 0


def test_new_holder_waits_for_the_earlier_memory(folder: Path) -> None:
    """A holder that a supervisor restarts does not have the descriptor of the earlier memory.

    Until an engine sends the descriptor, the holder refuses engines for the time being (`again`).
    """
    with _holding(folder) as holder:
        welcome, fd = Caller(holder, folder).ask(_hello())
        assert isinstance(welcome, Welcome)
        assert fd is not None
        segment = _token(holder)
    mark = mark_client(folder)
    with _holding(folder, adopt_s=600) as second:
        answer, _ = Caller(second, folder).ask(_hello(2))
        assert isinstance(answer, Unwelcome)
        assert answer.again
        assert isinstance(Caller(second, folder).ask(_hello(segment=segment), fd)[0], Welcome)
        assert _token(second) == segment
        assert isinstance(Caller(second, folder).ask(_hello(2))[0], Welcome)
    os.close(mark)


def test_new_holder_does_not_wait_for_the_memory_of_ended_engines(folder: Path) -> None:
    """No engine can send the earlier memory, so the holder creates a new memory at once."""
    os.close(mark_client(checked_folder(folder)))
    with _holding(folder, adopt_s=600) as holder:
        assert isinstance(Caller(holder, folder).ask(_hello())[0], Welcome)


def test_memory_with_a_holder_is_not_adopted(folder: Path, short_path: Path) -> None:
    """Two holders of one memory would both grant the same slot."""
    with _holding(folder) as holder, _holding(short_path / "other") as second:
        _, fd = Caller(holder, folder).ask(_hello())
        answer, _ = Caller(second, short_path / "other").ask(_hello(segment=_token(holder)), fd)
        assert answer == Unwelcome("another process holds the memory", again=True)


def test_memory_of_another_program_is_refused(folder: Path) -> None:
    """The holder refuses the memory and names the reason."""
    fd = os.memfd_create("other")
    with _holding(folder, adopt_s=600) as holder:
        answer, _ = Caller(holder, folder).ask(_hello(segment=b"x" * 16), fd)
        assert isinstance(answer, Unwelcome)
        assert "no whole header" in answer.why
    os.close(fd)


def test_memory_larger_than_possible_is_refused(folder: Path) -> None:
    """The message names the setting that must be changed."""
    with pytest.raises(ConfigError, match="pool_bytes_max"):
        create(1 << 40, 1 << 40)
    with _holding(folder) as holder:
        hello = Hello(VERSION, "scheduler", b"1" * 16, NAMESPACE, 1 << 40, 1 << 40)
        answer, _ = Caller(holder, folder).ask(hello)
        assert isinstance(answer, Unwelcome)
        assert "pool_bytes_max" in answer.why


def test_folder_has_one_holder(folder: Path) -> None:
    """The second holder of a folder ends at once."""
    with _holding(folder), pytest.raises(BlockingIOError):
        Holder(folder, adopt_s=0, keep_s=1)


def test_stale_socket_is_replaced(folder: Path) -> None:
    """The socket of a killed holder stays in the folder, and the next holder replaces it."""
    with _holding(folder):
        pass
    assert greet(folder, _hello(), None, 0.05) == "no answer"
    with _holding(folder) as holder:
        assert isinstance(Caller(holder, folder).ask(_hello())[0], Welcome)


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Another user could put a socket of their own into this folder."""
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        checked_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(checked_folder(tmp_path / "real"))
    with pytest.raises(ConfigError, match="alone"):
        checked_folder(tmp_path / "link")
    with pytest.raises(ConfigError, match="path"):
        checked_folder(tmp_path / ("x" * 100))


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without XDG_RUNTIME_DIR, the folder's name includes the user's number."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert folder_of_user() == Path("/run/user/7/kvpipe")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert folder_of_user().name == f"kvpipe-{os.geteuid()}"


def test_reused_process_number_is_noticed() -> None:
    """Two processes with the same number have different start times."""
    mine = process_of(os.getpid())
    pidfd = watch(mine)
    assert pidfd is not None
    os.close(pidfd)
    assert watch(mine._replace(started=mine.started - 1)) is None
    assert watch(mine._replace(pid=2**22 + 1)) is None


def _polled(pool: NodePool, holder: Holder | None = None) -> str:
    if holder is not None:
        holder.step()
    pool.poll()
    return pool.state


def test_engine_gives_up_a_holder_that_does_not_answer(folder: Path) -> None:
    """An engine that has never had the memory uses a private pool after its longest allowed wait."""
    with _holding(folder):
        pool = NodePool(options(folder, wait_s_max=0.2))
        assert eventually(lambda: _polled(pool) == "REFUSED")
        assert "within 0.2 s (last reason: no answer; see " in pool.why
        assert pool.why.endswith("holder.log)")
        pool.close()


def test_poll_reads_the_socket_only_when_an_answer_is_due(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without open questions rarely checks its connection. A check shows that the connection has ended."""
    with _holding(folder) as holder:
        pool = NodePool(options(folder))
        assert eventually(lambda: _polled(pool, holder) == "ATTACHED" and pool.stock.free > 0 and not pool._asks)
        with monkeypatch.context() as patched:
            patched.setattr(messages, "receive_by_engine", None)
            pool._looked_s = math.inf
            assert [_polled(pool) for _ in range(3)] == ["ATTACHED"] * 3
    pool._looked_s = 0
    assert _polled(pool) == "ORPHANED"
    pool.close()


def test_permanently_refused_engine_does_not_retry(folder: Path) -> None:
    """After such a refusal, the engine does not try again."""
    with _holding(folder) as holder:
        Caller(holder, folder).ask(_hello())
        pool = NodePool(options(folder, slot_bytes=64))
        assert eventually(lambda: _polled(pool, holder) == "REFUSED")
        assert "slots of" in pool.why
        assert issubclass(RefusedByHolderError, ConfigError)


@contextmanager
def _served(holder: Holder) -> Iterator[None]:
    """Make the holder's steps in a thread."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            holder.step()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_reason_of_the_last_refusal_is_in_the_error(folder: Path) -> None:
    """A holder that waits for an earlier memory refuses engines only for the time being."""
    mark = mark_client(checked_folder(folder))
    with (
        _holding(folder, adopt_s=600) as holder,
        _served(holder),
        pytest.raises(NoHolderError, match=r"an engine may still offer an earlier memory; see .*holder\.log"),
    ):
        reach(folder, _hello(), wait_s=2, answer_s=60)
    os.close(mark)


def test_closed_engine_and_rank_keep_no_descriptor(folder: Path) -> None:
    """One process may have many engines, one after another, so descriptors would add up."""
    with _holding(folder) as holder:
        with _served(holder):
            rank, pool = RankMemory(options(folder)), NodePool(options(folder))
            assert eventually(lambda: _polled(pool) == "ATTACHED")
            pool._thread.join()
            assert pool.segment is not None
            fds = [rank._reached.fd, rank._reached.wire.fileno(), pool.segment.fd]
            rank.close()
            pool.close()
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


def test_engine_that_closes_while_it_connects_leaves_no_client(folder: Path) -> None:
    """Otherwise the holder keeps the memory for this engine, which uses a private pool, until its process ends."""
    with _holding(folder) as holder, _served(holder):
        pool = NodePool(options(folder))
        assert eventually(lambda: holder._links)
        pool.close()
        assert eventually(lambda: holder._memory is not None and not holder._has_engines)
