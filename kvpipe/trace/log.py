"""Counters and the log. To count costs one increment, because a forward may be waiting. Only a fault costs more.

A line of the log is a record of Python's `logging`, below vLLM's logger. So vLLM's levels, format and handlers apply to
the line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from kvpipe.trace.counters import FAULTS, CounterName, FaultName
from kvpipe.trace.durations import Durations

if TYPE_CHECKING:
    from kvpipe.trace.events import Event

_BOUND = ("engine", "request", "epoch")
_TAKEN = {"event", "exc_info", "level", "method_name", "self"}  # names of fields that structlog uses
_FRAMES: Final = 5
"""The number of stack frames, of structlog and kvpipe, between the line that logs and the call of `logging`."""
_QUOTED = frozenset(" =\"'")
LOG_EVERY: Final = 1000
"""After the first fault of a kind, one in this many faults of the kind is logged."""
ID_CHARS_MAX = 256
"""The greatest length of a request's id in traces and logs. vLLM's own ids have less than 100 characters."""
_HIDDEN = {"t_ns", "wall_ns"}  # fields that the log omits, because each line of the log has its own time


class Counters(Counter[CounterName]):
    """Counters by name. The first fault of each kind is logged, and then every 1000th fault of this kind."""

    on_fault: Callable[[FaultName, int, dict[str, object]], object] | None = None
    """If set, this function gets a fault's (name, count, fields) instead of the log, which would delay a forward."""
    watcher: Callable[[FaultName, dict[str, object]], object] | None = None
    """If set, this function is called with (name, fields) for every fault, logged or not."""

    @functools.cached_property
    def durations(self) -> Durations:
        """The durations for histograms of the side that these counters belong to."""
        return Durations()

    @property
    def faults(self) -> dict[str, int]:
        """The counts of the faults that have occurred, by name."""
        return {name: count for name, count in tuple(self.items()) if name in FAULTS}

    def totals(self) -> dict[str, int]:
        """Return all counts by name."""
        return {str(name): count for name, count in tuple(self.items())}

    def count(self, name: CounterName, label: str) -> None:
        """Count `name`. If `label` is not "", also count `name.label`."""
        self[name] += 1
        if label:
            self[cast("CounterName", f"{name}.{label}")] += 1

    def fault(self, name: FaultName, **fields: Any) -> None:  # noqa: ANN401
        """Count a fault. The first fault of a kind, and then every 1000th fault of this kind, is logged."""
        self[name] += 1
        if self.watcher is not None:
            self.watcher(name, fields)
        if self[name] % LOG_EVERY != 1:
            return
        if self.on_fault is not None:
            self.on_fault(name, self[name], fields)
        else:
            warn(name, seen=self[name], **fields)


def _as_record(_logger: logging.Logger, _method: str, fields: MutableMapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments for `logging`. The record's message has the fields as text.

    The record's attribute `kvpipe` has the fields' values. Equal events have equal templates, so that error trackers
    group these events.
    """
    event, exc_info = fields.pop("event"), fields.pop("exc_info", None)
    template = " ".join([event, *(f"{key}=%s" for key in fields)])
    values = {"event": event} | {key: printable(value) for key, value in fields.items()}
    named = {"exc_info": exc_info, "stacklevel": _FRAMES, "extra": {"kvpipe": values}}
    return (template, *map(_shown, fields.values())), named


class Log(structlog.stdlib.BoundLogger):
    """A logger of structlog with its own processor, independent of the process's configuration.

    The logger never raises.

    vLLM and the host application control the levels and handlers of the logger below it.
    """

    threshold = logging.NOTSET
    """Lines below this level are dropped."""

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *args: Any, **fields: Any) -> None:  # noqa: ANN401
        # the method `exception` has no level of its own
        level = logging.getLevelNamesMapping().get(method_name.upper(), logging.ERROR)
        if level < self.threshold or not self._logger.isEnabledFor(level):
            return
        with contextlib.suppress(Exception):  # a handler that fails must not end the thread that logs
            super()._proxy_to_logger(method_name, event, *args, **fields)


log: Final = Log(logging.getLogger("vllm.kvpipe"), [_as_record], {})
warn, info = log.warning, log.info


def configure(level: str) -> None:
    """Drop lines below `level`. vLLM's own levels also apply."""
    log.threshold = logging.getLevelNamesMapping()[level.upper()]


def log_event(event: Event) -> None:
    """Log an event of the trace, bound to the event's request, without empty fields."""
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
    message = {f"{key}_" if key in _TAKEN else key: value for key, value in message.items()}
    bound = {key: message.pop(key) for key in _BOUND if key in message}
    log.log(event.level, name, **bound, **message)


def bounded(request: str) -> str:
    """Return a request's id for traces and logs. An id longer than `ID_CHARS_MAX` is cut and ends in a digest."""
    if len(request) <= ID_CHARS_MAX:
        return request
    digest = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{request[: ID_CHARS_MAX - 17]}~{digest}"


def printable(value: Any) -> Any:  # noqa: ANN401  (a value of any type)
    """Escape control characters if `value` is a text, such as a request id. Return other values unchanged."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return value.encode("unicode_escape").decode("ascii")


def _shown(value: object) -> str:
    """Return a field's value for a line of text. A word is unchanged. Any other value is written as by `repr`."""
    if isinstance(value, str) and value and value.isprintable() and _QUOTED.isdisjoint(value):
        return value
    return repr(value)
