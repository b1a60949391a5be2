"""`kvpipe pool` shows the memory of a node, and keeps it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import PendingFinding
from kvpipe.cli.doctor.hardware import check_memory
from kvpipe.cli.doctor.storage import check_node_pool
from kvpipe.cli.main import main
from kvpipe.cli.node_view import lines
from kvpipe.cli.pool import as_dict
from kvpipe.config.settings import load_settings
from kvpipe.errors import ConfigError
from kvpipe.node import health
from kvpipe.node.client import NodePool
from kvpipe.node.health import HolderHealth
from kvpipe.node.messages import MemoryStatus, NodeStatus
from kvpipe.node.processes import SOCKET, holder_of, is_stopped
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs.node_engine import options


@pytest.fixture
def folder(short_path: Path) -> Iterator[Path]:
    """Return a folder with a holder that `kvpipe pool start` has started."""
    made = short_path / "node"
    with _started(made) as process:
        yield made
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@contextmanager
def _started(folder: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command `kvpipe pool start` after the words `before`. The process ends at the end of the context."""
    command = [*before, sys.executable, "-m", "kvpipe", "pool", "start", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("holding")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_start_ends_cleanly_on_a_signal(short_path: Path, sent: signal.Signals) -> None:
    """The command also ends on SIGINT if SIGINT was ignored at its start, as in a shell's background."""
    with _started(short_path, "sh", "-c", 'trap "" INT; exec "$@"', "sh") as process:
        assert (short_path / SOCKET).exists()
        process.send_signal(sent)
        assert process.wait(WAIT_S) == 0
    assert not (short_path / SOCKET).exists()


@contextmanager
def _engine(folder: Path) -> Iterator[NodePool]:
    """Run an engine with a stock of six slots."""
    pool = NodePool(replace(options(folder), name="tiny-node-1"))

    def stocked() -> bool:
        pool.poll()
        return pool.stock.free == 6

    assert eventually(stocked)
    yield pool
    pool.close()


def _doctor(folder: Path, **keys: object) -> PendingFinding:
    found = check_node_pool(load_settings({"pool": "node", "pool_dir": str(folder), **keys}), HostFacts())
    assert found is not None
    return found


def test_status_shows_the_holder_the_slots_and_the_engines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine uses the memory that `kvpipe pool start` holds, and `kvpipe pool status` shows both."""
    assert main(["pool", "status", "--dir", str(folder)]) == 0
    assert "no memory yet" in capsys.readouterr().out
    assert _doctor(folder).detail.endswith("the first engine makes the memory")
    assert main(["pool", "start", "--dir", str(folder)]) == 2
    assert "has a holder already" in capsys.readouterr().err
    with _engine(folder):
        assert main(["pool", "status", "--dir", str(folder)]) == 0
        text = capsys.readouterr().out
        head = rf"holder \d+, up \d:\d\d:\d\d, at {folder}\nmemory: 512.0 KiB, 64 slots of 8.0 KiB, policy lru\n"
        assert re.match(head, text)
        assert re.search(r"^  granted +6 +48.0 KiB +9%$", text, re.MULTILINE)
        assert re.search(
            rf"^  tiny-node-1: attached, up [\d:]+, process {os.getpid()}\n"
            r"    6 slots in stock \(48.0 KiB\), 0 being written, 0 being read, 0 saved$", text, re.MULTILINE,
        )  # fmt: skip
        assert main(["pool", "status", "--json", "--dir", str(folder)]) == 0
        (memory,) = json.loads(capsys.readouterr().out)["memories"]
        assert memory["slots"]["granted"] == memory["clients"][0]["stock"] == 6


def test_top_shows_the_memory_of_engines_without_manage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines with the node's memory have no `manage`, so the holder's view needs neither address nor token."""
    with _engine(folder):
        assert main(["top", "--once", "--pool-dir", str(folder)]) == 0
        text = capsys.readouterr().out
    assert "● node  holder" in text
    assert "9% granted, 48.0 KiB" in text
    assert "engines   tiny-node-1  attached, up" in text
    assert main(["top", "--once", "--pool-dir", str(folder / "none")]) == 1
    assert "no holder runs" in capsys.readouterr().out


def test_doctor_reports_a_memory_of_another_size(folder: Path) -> None:
    """The engine that makes the memory decides its size, so another engine's `pool_bytes_max` has no effect."""
    with _engine(folder):
        assert _doctor(folder) == ("ok", ANY, "")
        assert _doctor(folder, pool_bytes_max="512KiB").status == "ok"
        found = _doctor(folder, pool_bytes_max="1GiB")
        assert (found.status, "pool_bytes_max is 1GiB" in found.detail) == ("warn", True)
        settings = load_settings({"pool": "node", "pool_dir": str(folder), "pool_bytes_max": "512GiB"})
        assert check_memory(settings, HostFacts()).status == "ok", "the memory is there already"


def test_holder_that_does_not_answer_is_shown_with_a_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases: a stopped holder, a holder without its socket, and a holder of another user."""
    monkeypatch.setattr(health, "ANSWER_S_MAX", 0.1)
    pid = holder_of(folder)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: is_stopped(pid))
        assert main(["pool", "status", "--dir", str(folder)]) == 1
        assert "it is stopped (SIGSTOP)" in capsys.readouterr().out
        found = _doctor(folder)
        assert (found.status, f"kill -CONT {pid}" in found.remedy) == ("warn", True)
        assert main(["top", "--once", "--pool-dir", str(folder)]) == 1
        assert "it is stopped (SIGSTOP)" in capsys.readouterr().out
    finally:
        os.kill(pid, signal.SIGCONT)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert main(["pool", "status", "--dir", str(folder)]) == 2
        assert "belongs to user" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="this user's alone"):
            _doctor(folder)
    (folder / SOCKET).unlink()
    assert "its socket was deleted" in _doctor(folder).detail


def test_status_without_a_holder_says_so(short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1, so that a script notices the missing holder."""
    assert main(["pool", "status", "--dir", str(short_path)]) == 1
    assert "no holder runs" in capsys.readouterr().out


def test_status_shows_each_slot_size() -> None:
    """A slot of one size is `elsewhere` if slots of another size use its memory."""
    slots = {"slots": 2, "published": 1, "granted": 0, "free": 0, "elsewhere": 1}
    memories = tuple(MemoryStatus(1 << size, slots, {}, ()) for size in (20, 21))
    health = HolderHealth(os.getpid(), NodeStatus(os.getpid(), memories))
    shown = lines(Path("/node"), health)
    assert [line for line in shown if line.startswith("memory")] == [
        "memory: 2.0 MiB, 2 slots of 1.0 MiB, policy ", "memory: 4.0 MiB, 2 slots of 2.0 MiB, policy ",
    ]  # fmt: skip
    assert sum("elsewhere" in line for line in shown) == 2
    assert [one["slot_bytes"] for one in json.loads(json.dumps(as_dict(health)))["memories"]] == [1 << 20, 1 << 21]
