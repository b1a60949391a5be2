"""A capture of kvpipe's log lines, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpipe.trace.log import log


class _KeepingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({**record.__dict__["kvpipe"], "log_level": record.levelname.lower()})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that receives all lines logged from now on, of any level.

    A line has the keys `event` and `log_level`, and the line's own fields.
    """
    before, kept, alone = (log._logger, log.threshold), _KeepingHandler(), logging.Logger(log.name)  # noqa: LOG001
    alone.addHandler(kept)
    log._logger, log.threshold = alone, logging.NOTSET
    try:
        yield kept.lines
    finally:
        log._logger, log.threshold = before
