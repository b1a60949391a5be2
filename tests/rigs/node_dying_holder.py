"""A holder that kills itself in the middle of a transition."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpipe.node.holder import Holder
from kvpipe.node.ledger import Ledger


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, step: str, count: int) -> None:
    """Run a holder that dies at the `count`-th call of the ledger's method `step`.

    The last character of `step` says when the holder dies: with "<" before the call, with "/" after half of the record
    is written, and otherwise after the call.
    """
    name, when = step.rstrip("</"), step[-1]
    real: Callable[..., Any] = getattr(Ledger, name)
    left = count

    def dying(self: Ledger, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and when == "<":
            _die()
        if left == 0 and when == "/":
            half = len(args[1]) // 2
            at = self._journal_at(args[0]) if name == "_append" else self.layout.table_at + args[0] * len(args[1])
            self._buffer[at : at + half] = args[1][:half]
            _die()
        result = real(self, *args)
        if left == 0:
            _die()
        return result

    setattr(Ledger, name, dying)
    Holder(folder, adopt_s=0, keep_s=30).run()
