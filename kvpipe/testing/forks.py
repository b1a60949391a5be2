"""Forks of the process that runs a test: user code forks where an engine is, and may collect it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def done_in_fork(work: Callable[[], object]) -> bool:
    """Call `work` in a fork, and wait for its end. Returns whether it raised nothing."""
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
    """Let a fork live meanwhile, which does nothing."""
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
