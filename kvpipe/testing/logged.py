"""The lines that kvpipe logs, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpipe.trace.log import log


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({**record.__dict__["kvpipe"], "log_level": record.levelname.lower()})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield the lines that are logged from now on, whatever their level: `event`, `log_level` and the fields."""
    before, kept, alone = (log._logger, log.threshold), _Kept(), logging.Logger(log.name)  # noqa: LOG001
    alone.addHandler(kept)
    log._logger, log.threshold = alone, logging.NOTSET
    try:
        yield kept.lines
    finally:
        log._logger, log.threshold = before
