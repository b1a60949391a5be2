"""Counters by reason and the structured log. Nothing here is on the forward's path unless something went wrong."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from typing import Any

import structlog


class Counters(Counter[str]):
    """How often each thing happened. Faults are logged too, the first of each kind and then every 1000th."""

    def fault(self, name: str, **fields: Any) -> None:  # noqa: ANN401
        """Count a fault and log it, with a bound on log volume."""
        self[name] += 1
        if self[name] % 1000 == 1:
            with contextlib.suppress(OSError, ValueError):  # a closed or full stderr must not reach the engine
                structlog.get_logger("kvpipe").warning(name, seen=self[name], **fields)


def configure(level: str) -> None:
    """Send kvpipe's log to stderr at `level`, one line per event. Does not touch other loggers."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
