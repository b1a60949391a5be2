"""Tests of the OpenTelemetry spans of requests, as an exporter gets these spans."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpipe.config.settings import load_settings
from kvpipe.config.tracing import tracing
from kvpipe.errors import ConfigError
from kvpipe.testing.waiting import eventually
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.otel import OtelSink
from tests.rigs.servers.collector import collector

MS = 1_000_000
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _life(request: str, parent: str = "") -> list[e.Event]:
    def at(ms: int) -> tuple[int, int, str, int, int, int, str]:
        return ms * MS, -1, request, 1, 1, (1_000_000 + ms) * MS, "e1"

    return [
        e.RequestAdded(*at(0), prompt_tokens=100, traceparent=parent),
        e.RequestAdmitted(*at(5), hit_tokens={"memory": 64}, missed_tokens=36, why="evicted"),
        e.RequestDone(*at(40), status="finished_stopped", loaded_tokens=64, lived_ms=40.0, traceparent=parent),
    ]


def test_a_request_is_a_span() -> None:
    """The span lasts from the request's arrival to its end.

    The span is a child of the client's span, and has the request's events.
    """
    exporter = InMemorySpanExporter()
    sink = OtelSink("e1", exporter)
    lives = zip(_life("r1", PARENT), _life("r2"), strict=True)
    assert not sink.write([one for pair in lives for one in pair])
    sink.write([transitions.LayerLanded(1, 0, "r1", 1, 1)])
    sink.close()
    first, second = exporter.get_finished_spans()
    assert (first.name, first.attributes and first.attributes["request.id"]) == ("kvpipe.request", "r1")
    assert (first.start_time, first.end_time) == (1_000_000 * MS, 1_000_040 * MS)
    assert first.parent is not None
    assert f"{first.parent.trace_id:032x}-{first.parent.span_id:016x}" in PARENT
    assert first.attributes is not None
    assert (first.attributes["loaded_tokens"], first.attributes["engine.id"]) == (64, "e1")
    assert [(one.name, one.timestamp) for one in first.events] == [
        ("request_added", 1_000_000 * MS),
        ("request_admitted", 1_000_005 * MS),
    ]
    admitted = first.events[1].attributes
    assert admitted is not None
    assert (admitted["hit_tokens.memory"], admitted["why"]) == (64, "evicted")
    assert second.parent is None
    assert first.resource.attributes["service.name"] == "kvpipe"


def test_a_collector_forwards_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's writer sends a span to a real collector. The collector forwards all data of the span."""
    monkeypatch.delenv("KVPIPE_TRACE_FILE", raising=False)
    with collector(tmp_path) as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        recorder, writer = tracing(load_settings({"otel": True}), "engine-1", "scheduler", e.SCHEDULER, 4)
        for event in _life("r1", PARENT):
            recorder.put(event)
        writer.close()
        assert eventually(lambda: received)
    (resource,) = received
    assert {one.key: one.value.string_value for one in resource.resource.attributes}.items() >= {
        ("service.name", "kvpipe"),
        ("service.instance.id", "engine-1"),
    }
    (span,) = resource.scope_spans[0].spans
    assert span.name == "kvpipe.request"
    assert f"{span.trace_id.hex()}-{span.parent_span_id.hex()}" in PARENT
    assert span.end_time_unix_nano - span.start_time_unix_nano == 40 * MS
    assert [one.name for one in span.events] == ["request_added", "request_admitted"]
    admitted = {one.key: one.value for one in span.events[1].attributes}
    assert (admitted["hit_tokens.memory"].int_value, admitted["why"].string_value) == (64, "evicted")


def test_data_of_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many requests have not ended, the data of the oldest of these requests are dropped."""
    monkeypatch.setattr("kvpipe.trace.otel.OPEN_MAX", 3)
    exporter = InMemorySpanExporter()
    sink = OtelSink("e1", exporter)
    for i in range(10):
        sink.write(_life(f"r{i}")[:1])
    assert list(sink._open) == ["r7", "r8", "r9"]
    sink.write([e.LoadPlanned(1, -1, "r9", 1, 1, job=i) for i in range(500)])
    assert len(sink._open["r9"]) == 128
    sink.write(
        [
            e.RequestDone(1, -1, "r9", 1, 1),
            transitions.ChunkPublished(1, -1, "r9", 1, 1),
            e.SavePlanned(1, -1, "r9", 1, 1),
        ]
    )
    assert "r9" not in sink._open, "what comes after the end begins nothing"
    sink.close()


def test_a_rank_sends_nothing() -> None:
    """Only the scheduler side sends spans of requests."""
    reported, writer = tracing(load_settings({"otel": True}), "e", "worker", 0, 4)
    writer.close()
    assert reported.lifecycle
    assert not any(isinstance(sink, OtelSink) for sink in writer._sinks)


def test_without_the_extra_the_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"otel=true needs OpenTelemetry .*pip install 'kvpipe\[otel\]'"):
        tracing(load_settings({"otel": True}), "e", "scheduler", -1, 4)
