"""Forks of the process that runs a test. User code may fork a process that has an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def done_in_fork(work: Callable[[], object]) -> bool:
    """Call `work` in a fork, and wait for the fork's end. Returns False if `work` has raised."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0) == (child, 0)


@contextmanager
def forked() -> Iterator[None]:
    """Keep an idle fork of this process alive during the context."""
    there, here = os.pipe()
    child = os.fork()
    if not child:
        os.close(here)
        os.read(there, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(here)
        os.close(there)
        os.waitpid(child, 0)
