"""Rotel, an OpenTelemetry collector, runs in its own process. Rotel forwards spans to a backend in this process."""

from __future__ import annotations

import gzip
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs.servers.sockets import LOCAL, free_port

PROGRAM = Path(__file__).parents[3] / ".cache" / "deploy" / "rotel" / "rotel-agent"
"""The collector's program, which `tools/setup.sh programs` installs."""


@contextmanager
def collector(folder: Path) -> Iterator[tuple[str, list[ResourceSpans]]]:
    """Run the collector. Yields (the collector's endpoint for OTLP over HTTP, the spans that the backend receives)."""
    received = list[ResourceSpans]()

    class Backend(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
            received.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    port = free_port()
    with ThreadingHTTPServer((LOCAL, 0), Backend) as backend, (folder / "collector.log").open("wb") as log:
        threading.Thread(target=backend.serve_forever, args=(0.01,), daemon=True).start()
        command = [
            str(PROGRAM), "start", "--pid-file", str(folder / "collector.pid"),
            "--otlp-http-endpoint", f"{LOCAL}:{port}", "--otlp-grpc-endpoint", f"{LOCAL}:{free_port()}",
            "--otlp-exporter-endpoint", f"http://{LOCAL}:{backend.server_port}", "--otlp-exporter-protocol", "http",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=log, stderr=log)

        def accepts() -> bool:
            assert process.poll() is None, (folder / "collector.log").read_text(encoding="utf-8")
            with socket.socket() as probe:
                return probe.connect_ex((LOCAL, port)) == 0

        try:
            assert eventually(accepts)
            yield f"http://{LOCAL}:{port}", received
        finally:
            process.terminate()
            process.wait(WAIT_S)
            backend.shutdown()
