"""Forks ranks, engines and servers of tests from a process that has imported vLLM. Each import takes ten seconds.

vLLM's CPU build spawns its processes instead. `tests/engine/test_server.py` and `test_tp.py::test_two_ranks` also spawn
them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvpipe.testing.waiting import eventually


class _Process(ForkServerProcess):
    """A process with the environment at the time of its start, like a spawned process."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


@contextmanager
def _context(made: BaseContext) -> Iterator[None]:
    """Make vLLM start its processes with the context `made`, even if vLLM asks for another method.

    This process and its forks wait for messages without spinning.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.utils import system_utils

    with (
        patch.object(system_utils, "multiprocessing", SimpleNamespace(get_context=lambda _method: made)),
        patch.object(SpinCondition.__init__, "__defaults__", (0.0,)),
    ):
        yield


def _forks() -> _Context:
    made = _Context()
    made.set_forkserver_preload(["tests.rigs.frozen"])
    return made


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Make engines in this process fork their ranks from a process that has imported vLLM and nothing else."""
    with _context(_forks()):
        yield


@contextmanager
def forks_of_this_process() -> Iterator[None]:
    """Make vLLM fork its engines and ranks from this process, which has imported vLLM."""
    with _context(multiprocessing.get_context("fork")):
        yield


class Forked:
    """A call of `main(*arguments)` in a fork of this process, with the interface of a `Popen`.

    The process leads a process group of its own.
    """

    def __init__(self, main: Callable[..., object], *arguments: object) -> None:
        self._process = _forks().Process(target=_lead, args=(main, *arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid, self.terminate, self.kill = self._process.pid, self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode


def _lead(main: Callable[..., object], *arguments: object) -> None:
    os.setsid()
    main(*arguments)


def members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of, *_ = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(member_of) == group and state not in {"Z", "X"}:
                found.append(int(path.parent.name))
    return found


def kill_group(process: Forked | subprocess.Popen[bytes]) -> None:
    """Kill `process` and the process group that it leads, and wait until no process of the group is left.

    A second call does nothing.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # this call also works if the process does not lead a group yet
    process.wait()
    assert eventually(lambda: not members(process.pid), every_s=0.01), members(process.pid)


def run_forked(log: Path, seconds_max: float, main: Callable[..., object], *arguments: object) -> int:
    """Run `main(*arguments)` in a fork of this process that writes to `log`, and return the fork's exit code."""
    process = Forked(_logged, str(log), main, *arguments)
    try:
        return process.wait(seconds_max)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text("utf-8", "replace")[-3000:]) from None
    finally:
        kill_group(process)


def _logged(log: str, main: Callable[..., object], *arguments: object) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(sink, standard)
    main(*arguments)


def serve(log: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Run vLLM's server. The server forks its engines and their ranks, and writes to the file `log`."""
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(sink, standard)
    os.environ.update(environment)
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["api_server", *arguments]
    with forks_of_this_process():
        main()
