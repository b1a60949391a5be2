"""Counters and the structured log. Only faults cost the forward's path more than an increment."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import structlog

from kvpipe.counters import FAULTS, CounterName, Fault

if TYPE_CHECKING:
    from kvpipe.trace.events import Event

_BOUND = ("engine", "request", "epoch")
_TAKEN = {"event", "level", "timestamp"}  # by structlog
Format = Literal["console", "json"]
LOG_EVERY: Final = 1000
"""Of the faults of one kind, the first is logged, and then one of so many."""
ID_CHARS_MAX = 256
"""The most characters of a request's id in traces and logs. vLLM's ids have less than 100, clients' any number."""
_HIDDEN = {"t_ns", "wall_ns"}  # the log has a clock of its own


class Counters(Counter[CounterName]):
    """Counters by name. Faults are logged too: the first of each kind, then every 1000th."""

    on_fault: Callable[[Fault, int, dict[str, object]], object] | None = None
    """Called with (name, count, fields) for those faults instead of logging them: logging would delay a forward."""
    watcher: Callable[[Fault, dict[str, object]], object] | None = None
    """Called with (name, fields) for every fault, logged or not."""

    @property
    def faults(self) -> dict[str, int]:
        """The counts of the faults that have happened, by name."""
        return {name: count for name, count in tuple(self.items()) if name in FAULTS}

    def totals(self) -> dict[str, int]:
        """Return all counts by name."""
        return {str(name): count for name, count in tuple(self.items())}

    def count(self, name: CounterName, label: str) -> None:
        """Count `name`, and `name.label` too if there is a label."""
        self[name] += 1
        if label:
            self[cast("CounterName", f"{name}.{label}")] += 1

    def fault(self, name: Fault, **fields: Any) -> None:  # noqa: ANN401
        """Count a fault, and log it if it is the first of its kind or every 1000th."""
        self[name] += 1
        if self.watcher is not None:
            self.watcher(name, fields)
        if self[name] % LOG_EVERY != 1:
            return
        if self.on_fault is not None:
            self.on_fault(name, self[name], fields)
        else:
            warn(name, seen=self[name], **fields)


class _Stderr:
    """Stderr, which may be closed or full: a write that fails must not raise in the thread that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(level: str, form: Format = "console") -> None:
    """Send kvpipe's log to stderr at `level`, one line per event. Does not touch other loggers."""
    last: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False)]
    if form == "json":
        last = [structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Stderr(sys.stderr))),
        cache_logger_on_first_use=False,
    )


def log_event(event: Event) -> None:
    """Log an event of the trace, bound to its request, without its empty fields."""
    message = {name: getattr(event, name) for name in event.__struct_fields__ if name not in _HIDDEN}
    message = {name: value for name, value in message.items() if isinstance(value, bool) or value}
    if event.rank >= 0:
        message["rank"] = event.rank
    else:
        del message["rank"]
    name = str(event.__struct_config__.tag)
    if name == "fault":
        name, message = str(message.pop("name")), message | dict(message.pop("fields", {}))
        message.pop("fields", None)
    message = {f"{key}_" if key in _TAKEN else key: printable(value) for key, value in message.items()}
    bound = {key: message.pop(key) for key in _BOUND if key in message}
    structlog.get_logger("kvpipe").bind(**bound).log(event.level, name, **message)


def warn(name: str, **fields: object) -> None:
    """Log a warning. Never raises for a closed or full stream, even before `configure`."""
    with contextlib.suppress(OSError, ValueError):
        structlog.get_logger("kvpipe").warning(name, **fields)


def info(name: str, **fields: object) -> None:
    """Log at level INFO; otherwise as `warn`."""
    with contextlib.suppress(OSError, ValueError):
        structlog.get_logger("kvpipe").info(name, **fields)


def bounded(request: str) -> str:
    """Return a request's id as in traces and logs. One longer than `ID_CHARS_MAX` is cut, and ends in a digest."""
    if len(request) <= ID_CHARS_MAX:
        return request
    digest = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{request[: ID_CHARS_MAX - 17]}~{digest}"


def printable(value: Any) -> Any:  # noqa: ANN401  (whatever it is)
    """Return a text with its control characters escaped, as request ids may be anything; other values unchanged."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return value.encode("unicode_escape").decode("ascii")
