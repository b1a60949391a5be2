"""Counters by reason and the structured log. Nothing here is on the forward's path unless something went wrong."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import structlog

if TYPE_CHECKING:
    from kvpipe.trace.events import Event

_BOUND = ("engine", "request", "epoch")
_TAKEN = {"event", "level", "timestamp"}  # by structlog
Format = Literal["console", "json"]
ID_CHARS_MAX = 256
"""Of a request's id in traces and logs; vLLM's own ids have less than 100. A client may send any."""
_HIDDEN = {"t_ns", "wall_ns"}  # the log has a clock of its own


class Counters(Counter[str]):
    """How often each thing happened. Faults are told too, the first of each kind and then every 1000th."""

    listener: Callable[[str, int, dict[str, object]], object] | None = None
    """Hears of the faults in place of the log: whoever counts them may be on the forward's path."""

    def __init__(self) -> None:
        """Nothing has happened."""
        super().__init__()
        self.fault_names: set[str] = set()

    @property
    def faults(self) -> dict[str, int]:
        """How often each fault has happened."""
        return {name: self[name] for name in tuple(self.fault_names)}

    def noted(self, name: str) -> None:
        """Count a fault of which an event of its own tells."""
        self[name] += 1
        self.fault_names.add(name)

    def fault(self, name: str, **fields: Any) -> None:  # noqa: ANN401
        """Count a fault and tell of it, with a bound on log volume."""
        self.noted(name)
        if self[name] % 1000 == 1:
            if self.listener is not None:
                self.listener(name, self[name], fields)
                return
            warn(name, seen=self[name], **fields)


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def tell(event: Event) -> None:
    """Log a traced event, bound to its request; what says nothing is left out."""
    said = {name: getattr(event, name) for name in event.__struct_fields__ if name not in _HIDDEN}
    said = {name: value for name, value in said.items() if isinstance(value, bool) or value}
    if event.rank >= 0:
        said["rank"] = event.rank
    else:
        del said["rank"]
    name = str(event.__struct_config__.tag)
    if name == "fault":
        name, said = str(said.pop("name")), said | dict(said.pop("fields", {}))
        said.pop("fields", None)
    said = {f"{key}_" if key in _TAKEN else key: printable(value) for key, value in said.items()}
    bound = {key: said.pop(key) for key in _BOUND if key in said}
    with contextlib.suppress(OSError, ValueError):  # a closed or full stderr must not stop the writer
        structlog.get_logger("kvpipe").bind(**bound).log(event.level, name, **said)


def warn(name: str, **fields: object) -> None:
    """Log a warning; a closed or full stderr does not matter."""
    with contextlib.suppress(OSError, ValueError):
        structlog.get_logger("kvpipe").warning(name, **fields)


def bounded(request: str) -> str:
    """Return what traces and logs call a request: its id, or the beginning and a digest of one that is very long."""
    if len(request) <= ID_CHARS_MAX:
        return request
    digest = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{request[: ID_CHARS_MAX - 17]}~{digest}"


def printable(value: Any) -> Any:  # noqa: ANN401  (whatever it is)
    """Return a text with its control characters spelled out: a request id may be anything. Other values as they are."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return value.encode("unicode_escape").decode("ascii")
