"""Ranks and engines of tests are forked from a process that has imported vLLM: to import it takes each ten seconds.

vLLM's CPU build spawns its processes. `tests/engine/test_server.py` and `test_tp.py::test_two_ranks` leave it at that.
As a program (`python -m tests.engine.forked ARGUMENTS`) this is vLLM's server, which forks its engines and their ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

PRELOADED = ("vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor", "kvpipe.connectors.vllm.connector")


class _Process(ForkServerProcess):
    """A process with the environment that there is when it starts, as a spawned one has it."""

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
    """Let vLLM start its processes by `made`, whatever method it asks for."""
    from vllm.utils import system_utils

    with patch.object(system_utils, "multiprocessing", SimpleNamespace(get_context=lambda _method: made)):
        yield


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let engines in this process fork their ranks from a process that has imported vLLM and nothing more."""
    made = _Context()
    made.set_forkserver_preload(list(PRELOADED))
    with _context(made):
        yield


def main() -> None:
    """Run vLLM's server."""
    with _context(multiprocessing.get_context("fork")):
        sys.argv[0] = "api_server"
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
