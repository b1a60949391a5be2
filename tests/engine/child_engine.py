"""A second engine, in a process of its own: takes requests as lines of JSON, answers with lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpipe.testing.waiting import WAIT_S


class Child:
    """An engine in another process."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        """Start it; `options` are those of `tests.engine.common.engine`. `environment`: further variables."""
        command = [sys.executable, "-m", "tests.engine.child_engine", json.dumps(options)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> tuple[list[Any], dict[str, int]]:
        """Return its answers, and the tokens that it has found so far by tier.

        `at_once=True`: it answers before it has saved and stored, which it does afterwards, as an idle server does.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"prompts": prompts, "max_tokens": tokens} | more), file=self._process.stdin, flush=True)
        answers, hits = json.loads(self._process.stdout.readline())
        return answers, hits

    def close(self) -> None:
        """Let it shut down in good order."""
        try:
            self._process.communicate(timeout=WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
        assert self._process.returncode == 0


@contextmanager
def child(environment: dict[str, str] | None = None, **options: Any) -> Iterator[Child]:
    """Run a second engine meanwhile, with further variables in its environment."""
    made = Child(options, environment)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.engine.common import assert_clean, engine, waiting

    with waiting(), engine(**json.loads(sys.argv[1])) as live:
        for line in sys.stdin:
            asked = json.loads(line)
            at_once = asked.pop("at_once", False)
            answers = live.generate(asked.pop("prompts"), **asked)
            side = live.connector.scheduler
            assert side is not None
            if not at_once:
                assert_clean(live)
            print(json.dumps([answers, side.report.hit_tokens]), file=out, flush=True)
            assert_clean(live)


if __name__ == "__main__":
    main()
