"""Real processes on one node's memory: engines and holders are killed, stopped and continued."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final, NamedTuple

from kvpipe.node.ledger import Ledger
from kvpipe.node.processes import LOG, holder_of
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs import node_dying_holder, node_engine
from tests.rigs.node_engine import SLOT_BYTES, SLOTS, BusyEngine, content

DYING_STEPS: Final = (
    "_append<", "_append/", "_append", "_put/", "_put", "_raise", "set_row<", "set_row", "set_namespace",
)  # fmt: skip


FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.rigs.node_engine", "tests.rigs.node_dying_holder"])


class EngineProcess(NamedTuple):
    """The process of an engine, and the connection on which the engine reports its first hit."""

    process: ForkServerProcess
    busy: Connection

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self.process.pid is not None
        return self.process.pid


class NodeProcesses:
    """The engines of one folder, and an observer: an engine in this process that checks the bytes that it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[EngineProcess] = []
        self.holders: list[ForkServerProcess] = []
        self.observer: BusyEngine | None = None

    def hold(self, step: str, count: int) -> None:
        """Start a holder that kills itself at a step."""
        self.holders.append(FORKS.Process(target=node_dying_holder.main, args=(self.folder, step, count)))
        self.holders[-1].start()
        assert eventually(lambda: (self.folder / "holder.sock").exists() or not self.holders[-1].is_alive())

    def observe(self) -> BusyEngine:
        """Attach the observer."""
        self.observer = BusyEngine(self.folder, 0)
        assert eventually(self._is_observing)
        return self.observer

    def _is_observing(self) -> bool:
        assert self.observer is not None
        self.observer.step()
        assert self.observer.wrong == 0
        return self.observer.saved > 0

    def start(self, seed: int, *, die: str = "", slot_bytes: int = SLOT_BYTES) -> EngineProcess:
        """Start an engine."""
        busy, its = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=node_engine.main, args=(self.folder, seed, die, slot_bytes, its))
        process.start()
        its.close()
        self.engines.append(EngineProcess(process, busy))
        return self.engines[-1]

    def ended(self, engine: EngineProcess) -> int | None:
        """Wait for the end of an engine, and return its status."""
        engine.process.join(WAIT_S)
        self.engines.remove(engine)
        return engine.process.exitcode

    def holder(self) -> int:
        """Return the number of the holder's process, or 0 if there is no holder."""
        return holder_of(self.folder)

    def kill(self, engine: EngineProcess, sent: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to an engine. An engine that ends otherwise than by this SIGKILL has read wrong bytes."""
        os.kill(engine.pid, sent)
        if sent == signal.SIGKILL:
            assert self.ended(engine) == -signal.SIGKILL

    def report(self) -> str:
        """Return the state of the observer, the slots and all processes, for the message of a failure."""
        observer = self.observer
        assert observer is not None
        assert observer.pool.segment is not None
        ledger = Ledger(observer.pool.segment)
        states = Counter(record.state for slot in range(SLOTS) if (record := ledger.entry(slot)) is not None)
        grants = Counter(grant.state.name for grant in observer.pool.stock.grants.values())
        rows = {row: client for row in range(ledger.layout.rows) if (client := ledger.row(row)).token}
        log = (self.folder / LOG).read_text(encoding="utf-8")[-2000:]
        return (
            f"{observer.pool.state} {observer.pool.why} asks={observer.pool._asks} slots={dict(states)} "
            f"grants={dict(grants)} rows={rows} engines={[(one.pid, one.process.is_alive()) for one in self.engines]} "
            f"holder={self.holder()}\n{log}"
        )

    def observing(self, what: str, true: object, limit_s: float = WAIT_S) -> float:
        """Let the observer work until `true()` returns true. Returns the seconds until then."""
        assert callable(true)
        assert self.observer is not None
        began = time.monotonic()
        while not true():
            for _ in range(4):
                self.observer.step()
            time.sleep(0.002)
            assert self.observer.wrong == 0
            assert time.monotonic() - began < limit_s, f"{what}: {self.report()}"
        return time.monotonic() - began

    def saves_on(self, count: int = 20) -> None:
        """Let the observer save and read `count` chunks. This requires a holder that answers."""
        observer = self.observer
        assert observer is not None
        saved, hits = observer.saved, observer.hits
        self.observing("saves", lambda: observer.saved >= saved + count and observer.hits >= hits + count)

    def rest(self) -> None:
        """End all engines but the observer. Then every slot is free, published, or in the observer's stock."""
        for engine in list(self.engines):
            os.kill(engine.pid, signal.SIGCONT)
            self.kill(engine)
        observer = self.observer
        assert observer is not None
        assert observer.pool.segment is not None
        ledger = Ledger(observer.pool.segment)

        def is_quiet() -> bool:
            states = [record.state for slot in range(SLOTS) if (record := ledger.entry(slot)) is not None]
            rows = [row for row in range(ledger.layout.rows) if ledger.row(row).token]
            granted = states.count("GRANTED")
            mine = len(observer.pool.stock.grants)
            return (
                len(states) == SLOTS
                and len(rows) == 1
                and states.count("QUARANTINE") == states.count("EVICTING") == 0
                and granted <= mine
                and observer.pool.state == "ATTACHED"
            )

        self.observing("rest", is_quiet)
        for slot in range(SLOTS):
            record = ledger.entry(slot)
            assert record is not None
            if record.state == "PUBLISHED":
                assert bytes(observer.pool.segment.slot(slot)) == content(record.key)
        leased = sum(observer.pool.segment.leases)
        assert observer.pool.leases is not None
        assert leased == observer.pool.leases.count

    def close(self) -> None:
        """End every process."""
        for process in [*self.holders, *(engine.process for engine in self.engines)]:
            process.kill()
            process.join()
        if self.observer is not None:
            self.observer.pool.close()
        if (pid := self.holder()) > 0:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def processes(folder: Path) -> Iterator[NodeProcesses]:
    """Make the processes of a folder, and end them all afterwards."""
    made = NodeProcesses(folder / "node")
    try:
        yield made
    finally:
        made.close()
