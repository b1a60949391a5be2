"""This sink sends requests as OpenTelemetry spans, which are children of the client's spans. Needs `kvpipe[otel]`.

A request's span is made when the request is over, with the times of the request's events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpipe import __version__
from kvpipe.errors import ConfigError
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.recorder import each

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OPEN_MAX = 100_000
EVENTS_MAX = 128  # the most events of one request's span
_EXPORTED = (
    e.Lookup,
    e.LoadPlanned,
    e.SavePlanned,
    transitions.Preempted,
    transitions.Resumed,
    transitions.Recomputing,
)
_NS_PER_MS = 1_000_000


class OtelSink:
    """A sink that sends one span per request, from the scheduler's side."""

    def __init__(self, engine: str, exporter: SpanExporter | None = None) -> None:
        """Without an `exporter` spans are sent by OTLP, which the `OTEL_EXPORTER_OTLP_` variables configure.

        Raises:
            ConfigError: the extra `kvpipe[otel]` is not installed.

        """
        try:
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

                exporter = OTLPSpanExporter()
        except ImportError as error:
            msg = f"kvpipe: otel=true needs OpenTelemetry ({error}); pip install 'kvpipe[otel]', or set otel=false"
            raise ConfigError(msg) from None
        resource = Resource.create({"service.name": "kvpipe", "service.instance.id": engine})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvpipe", __version__)
        self._open: OrderedDict[str, list[e.Event]] = OrderedDict()
        self.lost = 0

    def write(self, events: Sequence[e.Event]) -> str:
        """Collect the events of each request, and send the spans of requests that are over. Returns as `Sink.write`."""
        reported, why = each(events, self._export)
        self.lost += len(events) - len(reported)
        return why

    def _export(self, event: e.Event) -> None:
        if isinstance(event, e.RequestDone):
            self._send(event, self._open.pop(event.request, []))
        elif isinstance(event, e.RequestAdded | e.RequestAdmitted):
            if event.request not in self._open and len(self._open) >= OPEN_MAX:
                self._open.popitem(last=False)
            self._open.setdefault(event.request, []).append(event)
        elif isinstance(event, _EXPORTED) and event.request in self._open:
            self._open[event.request].append(event)
        if event.request in self._open:
            del self._open[event.request][EVENTS_MAX:]

    def close(self) -> None:
        """Send the remaining spans, and stop the exporter."""
        self._provider.shutdown()

    def _send(self, done: e.RequestDone, before: list[e.Event]) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        header = {"traceparent": done.traceparent} if done.traceparent else {}
        parent = TraceContextTextMapPropagator().extract(header) if header else None
        span = self._tracer.start_span(
            "kvpipe.request",
            context=parent,
            kind=SpanKind.INTERNAL,
            start_time=done.wall_ns - int(done.lived_ms * _NS_PER_MS),
            attributes={"request.id": done.request, "engine.id": done.engine, **_attributes(done)},
        )
        for one in before:
            span.add_event(e.tag_of(one), _attributes(one), one.wall_ns)
        span.end(done.wall_ns)


def _attributes(event: e.Event) -> dict[str, str | int | float | bool]:
    """Return the fields of `event` that only some events have. A dict's entry becomes an attribute `field.key`."""
    common = set(e.Event.__struct_fields__)
    message: dict[str, str | int | float | bool] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name not in common:
            message.update({f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value})
    return message
