"""Several engines need a holder at the same time: only one of them starts a holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kvpipe
from kvpipe.node import connect
from kvpipe.node.client import NodePool, NodePoolOptions
from kvpipe.node.connect import start_holder
from kvpipe.node.processes import checked_folder, holder_of
from kvpipe.testing.waiting import WAIT_S

ENGINES = 4


@pytest.fixture
def folder(short_path: Path) -> Iterator[Path]:
    """Return the folder of a node's memory, and kill its holder at the end."""
    made = checked_folder(short_path / "node")
    yield made
    if holder := holder_of(made):
        os.kill(holder, signal.SIGKILL)


def test_one_engine_starts_the_holder_when_several_have_lost_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a holder takes a fifth of a second of a core. Several starts at once would delay the next save."""
    begun = list[object]()
    run = subprocess.run

    def counted(*arguments: Any, **named: Any) -> object:
        begun.append(arguments)
        return run(*arguments, **named)

    monkeypatch.setattr(connect, "START_S", WAIT_S)
    monkeypatch.setattr(connect, "STARTED_LOOKS", round(WAIT_S / connect.LOOK_S))
    with patch.object(subprocess, "run", counted):
        engines = [
            threading.Thread(target=start_holder, args=(folder, None), kwargs={"limit_s": 60.0}) for _ in range(ENGINES)
        ]
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.join()
    assert holder_of(folder)
    assert len(begun) == 1


NEEDED = {"kvpipe", "msgspec", "typing_extensions"}
"""The packages that a holder imports. msgspec imports the last package. A further package would delay the start."""
IMPORTED = """
import sys
import kvpipe.node.holder
site = next(path for path in sys.path if path.endswith("site-packages"))
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*[name for name, file in files.items() if "." not in name and file.startswith(site)])
"""


def test_holder_imports_no_package_that_it_does_not_need() -> None:
    """`.pth` files of the environment may import further modules, before any import of kvpipe's."""
    run = [sys.executable, "-P", "-c"]
    paths = os.environ | {"PYTHONPATH": str(Path(kvpipe.__file__).parents[1])}
    names = [
        set(subprocess.run([*run, code], check=True, capture_output=True, text=True, env=paths).stdout.split())
        for code in (IMPORTED.replace("import kvpipe.node.holder", ""), IMPORTED)
    ]
    assert names[1] - names[0] <= NEEDED


DEFAULT = """
import sys
import kvpipe.node.holder
from kvpipe.node.evictor import evicting
from kvpipe.node.rules import DEFAULT_POLICY, check_policy
check_policy(DEFAULT_POLICY)
evicting(DEFAULT_POLICY, 8)
print("kvpipe.inputs.plugins" in sys.modules)
"""


def test_default_policy_needs_no_registry_of_policies() -> None:
    """The registry reads the entry points of all installed packages, which takes as long as the rest of a start."""
    paths = os.environ | {"PYTHONPATH": str(Path(kvpipe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-P", "-c", DEFAULT], check=True, capture_output=True, text=True, env=paths)
    assert done.stdout == "False\n"


def test_serving_holder_loads_no_library_that_it_does_not_need(folder: Path) -> None:
    """An engine attaches and gets slots. numpy, for example, is needed only by memory of several slot sizes."""
    pool = NodePool(NodePoolOptions(folder, b"n" * 32, 64, 4096, stock=8))
    until = time.monotonic() + WAIT_S
    while not pool.stock.free and time.monotonic() < until:
        pool.poll()
        time.sleep(0.002)
    assert pool.stock.free
    maps = Path(f"/proc/{holder_of(folder)}/maps").read_text(encoding="utf-8")
    pool.close()
    assert {line.partition("site-packages/")[2].partition("/")[0] for line in maps.splitlines()} - {""} <= NEEDED


def test_forked_process_does_not_keep_the_turn_to_start(folder: Path) -> None:
    """An engine may be forked while it starts a holder."""
    with connect._turn_to_start(folder, WAIT_S):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        began = time.monotonic()
        with connect._turn_to_start(folder, 2 * WAIT_S):
            assert time.monotonic() - began < WAIT_S
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


STARTER = """
import os, signal, sys
from kvpipe.node.connect import _turn_to_start
from pathlib import Path
with _turn_to_start(Path(sys.argv[1]), 1.0):
    print("starts", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_engine_starts_the_holder_when_the_one_that_starts_it_is_stopped(folder: Path) -> None:
    """An engine that is stopped before it has started a holder delays no other engine."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"starts\n"
        os.waitid(os.P_PID, starter.pid, os.WSTOPPED)
        began = time.monotonic()
        with patch("kvpipe.node.connect.START_S", WAIT_S):
            start_holder(folder, None, limit_s=2 * WAIT_S)
        assert holder_of(folder)
        assert time.monotonic() - began < WAIT_S
    finally:
        starter.kill()
        starter.wait()
