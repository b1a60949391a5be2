"""A second engine, in a process of its own. The engine receives requests and sends answers over a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs.forked import Forked, forks_of_this_process, kill_group, members


class Child:
    """An engine in another process."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        """Start the engine.

        `options` are the options of `tests.engine.common.engine`. The option `processor` names the kind of processor on
        which the engine runs. `environment` has more environment variables.
        """
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = Forked(serve, theirs, options, environment or {})
        theirs.close()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> tuple[list[Any], dict[str, int]]:
        """Return the engine's answers, and the number of tokens that the engine has found so far, by tier.

        With `at_once=True` the engine first sends its answers, and then saves and stores chunks, like an idle server.
        """
        self._pipe.send({"prompts": prompts, "max_tokens": tokens} | more)
        answers, hits = self._pipe.recv()
        return answers, hits

    def kill(self) -> None:
        """Kill all processes of the engine."""
        kill_group(self._process)
        self._pipe.close()

    def close(self) -> None:
        """Shut the engine down without killing a process. All processes of the engine must end."""
        self._pipe.close()
        try:
            assert self._process.wait(WAIT_S) == 0
            assert eventually(lambda: not members(self._process.pid), every_s=0.01), members(self._process.pid)
        finally:
            kill_group(self._process)


@contextmanager
def child(environment: dict[str, str] | None = None, **options: Any) -> Iterator[Child]:
    """Run a second engine during the context. `environment` has more environment variables for the engine's process."""
    made = Child(options, environment)
    try:
        yield made
    finally:
        made.close()


def serve(pipe: Connection, options: dict[str, Any], environment: dict[str, str]) -> None:
    """Serve until the other end of `pipe` is closed."""
    os.environ.update(environment)
    from kvpipe.connectors.vllm.trial.processors import complete
    from tests.engine.common import assert_clean, engine, waiting

    with forks_of_this_process(), complete(options.pop("processor", None)), waiting(), engine(**options) as live:
        while asked := _next(pipe):
            at_once = asked.pop("at_once", False)
            answers = live.generate(asked.pop("prompts"), **asked)
            side = live.connector.scheduler
            assert side is not None
            if not at_once:
                assert_clean(live)
            pipe.send((answers, dict(side.tracer.hit_tokens)))
            assert_clean(live)


def _next(pipe: Connection) -> dict[str, Any]:
    try:
        asked: dict[str, Any] = pipe.recv()
    except EOFError:
        return {}
    return asked
