"""Engines and holders are killed or stopped: no torn chunk is read, no slot is lost, and other engines continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.node.holder import Holder
from kvpipe.statemachine import node_grant, node_link
from kvpipe.testing.waiting import eventually
from tests.rigs.node_processes import NodeProcesses, processes

ENGINE_DEATHS = ((node_link.ANSWER, 1), (node_grant.TAKE, 7), (node_grant.LANDED, 5))
HOLDER_DEATHS = ("_append/", "_put/", "_raise", "set_row")
"""A few of the ledger's steps. `test_world.py` has all steps, without processes."""


def test_other_engines_continue_when_an_engine_is_killed(short_path: Path) -> None:
    """The killed engine's leases and grants end when the holder sees its exit."""
    with processes(short_path) as node:
        observer = node.observe()
        victim = node.start(1)
        assert victim.busy.recv() == "busy"
        node.kill(victim)
        segment = observer.pool.segment
        assert segment is not None
        leases = segment.leases_of(1)
        node.observing("leases end", lambda: not any(leases))
        node.saves_on()
        node.rest()


def test_stopped_engine_delays_no_other_engine(short_path: Path) -> None:
    """A stopped engine keeps its slots and leases, and continues when the process is continued."""
    with processes(short_path) as node:
        node.observe()
        stopped = node.start(1)
        assert stopped.busy.recv() == "busy"
        node.kill(stopped, signal.SIGSTOP)
        node.saves_on(100)
        node.kill(stopped, signal.SIGCONT)
        node.saves_on(20)
        assert stopped.process.is_alive()
        node.rest()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_chunks_survive_a_holder(short_path: Path, sent: signal.Signals) -> None:
    """Hits continue without a holder. The next holder has every chunk."""
    with processes(short_path) as node:
        observer = node.observe()
        node.saves_on(100)
        replica = observer.replica
        assert replica is not None
        old = node.holder()
        os.kill(old, sent)
        node.observing("lost", lambda: observer.pool.state == "ORPHANED")
        assert len(replica.index(0)) > 5
        hits = observer.hits
        node.observing("hits", lambda: observer.hits > hits)
        node.observing("found", lambda: observer.pool.state == "ATTACHED")
        assert node.holder() not in {0, old}
        assert replica.scans == 1
        node.saves_on()
        node.rest()


def test_next_holder_adopts_the_memory_of_an_idle_engine(short_path: Path) -> None:
    """The idle engine offers nothing. A new engine finds its chunks, and it continues when it takes steps again."""
    with processes(short_path) as node:
        idle = node.start(1)
        assert idle.busy.recv() == "busy"
        os.kill(idle.pid, signal.SIGSTOP)
        os.kill(node.holder(), signal.SIGKILL)
        observer = node.observe()
        assert observer.pool.segment is not None
        held = [path.stat().st_ino for path in Path(f"/proc/{idle.pid}/fd").iterdir()]
        assert os.fstat(observer.pool.segment.fd).st_ino in held
        node.observing("hits", lambda: observer.hits)
        os.kill(idle.pid, signal.SIGCONT)
        node.saves_on()
        assert observer.pool.engines == 2
        assert idle.process.is_alive()
        node.rest()


@pytest.mark.parametrize("step", HOLDER_DEATHS)
def test_holder_that_dies_within_a_transition_loses_nothing(short_path: Path, step: str) -> None:
    """The next holder finishes the transition or undoes it."""
    with processes(short_path) as node:
        node.hold(step, 1 if step.startswith("set") else 30)
        node.observe()
        assert eventually(lambda: _dies(node))
        node.saves_on()
        node.rest()


def _dies(node: NodeProcesses) -> bool:
    assert node.observer is not None
    node.observer.step()
    return not node.holders[0].is_alive()


@pytest.mark.parametrize(("event", "count"), ENGINE_DEATHS)
def test_engine_that_dies_at_a_transition_leaves_nothing(short_path: Path, event: str, count: int) -> None:
    """A chunk that the engine was writing is never served, and its slots are reused."""
    with processes(short_path) as node:
        node.observe()
        victim = node.start(1, die=f"{event}:{count}")
        assert node.ended(victim) == -signal.SIGKILL
        node.saves_on()
        node.rest()


def test_memory_ends_with_the_last_engine(short_path: Path) -> None:
    """Some time after the last engine, the holder exits, too, and the memory is freed."""
    with processes(short_path) as node:
        observer = node.observe()
        holder = node.holder()
        assert holder > 0
        observer.pool.close()
        assert eventually(lambda: node.holder() == 0, every_s=0.05)
        assert not (short_path / "node" / "holder.sock").exists()


PAIR = """
import sys, time
from pathlib import Path
from kvpipe.node.client import NodePool
from tests.rigs.node_engine import options
pools = [NodePool(options(Path(sys.argv[1]))) for _ in range(2)]
while any(pool.state != "ATTACHED" for pool in pools):
    [pool.poll() for pool in pools]
    time.sleep(0.01)
print("attached", flush=True)
time.sleep(600)
"""


def test_engines_of_one_process_end_with_the_process(short_path: Path) -> None:
    """The holder watches one pidfd for both engines of the process."""
    holder = Holder(short_path / "node", adopt_s=0, keep_s=600)
    child = subprocess.Popen([sys.executable, "-c", PAIR, str(short_path / "node")], stdout=subprocess.PIPE)
    assert eventually(lambda: _steps(holder) == 2)
    child.kill()
    assert eventually(lambda: _steps(holder) == 0)
    child.wait()


def _steps(holder: Holder) -> int:
    holder.step()
    return len(list(holder._memory.clients)) if holder._memory is not None else -1
