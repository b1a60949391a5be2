"""Measures the time to write the page of a trace of 100,000 events, and a real browser's time to draw the page.

The time and memory of the command `kvpipe trace timeline` are measured with a larger trace.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.report import Figure
from kvpipe.trace.timeline_html import write_html
from tests.rigs.browser import Browser
from tests.rigs.synthetic_trace import play

EVENTS = 100_000
REPEATS = 5
REQUESTS = 1970
"""The number of requests of a trace of 76 MB."""
_MEASURED = """
import re, sys, time
from kvpipe.cli.main import main
status = main(sys.argv[1:])
print(time.process_time(), re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1])
sys.exit(status)
"""
"""A program that prints its own time and memory. A child's `rusage` would report at least the parent's memory."""


def run() -> list[Figure]:
    """Measure a trace with all kinds of events, a dense trace of forwards and copies only, and the command."""
    events = play(700, ranks=2, layers=8)
    assert len(events) > EVENTS
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder) / "timeline.html"
        written = []
        for _ in range(3):
            begin = time.perf_counter()
            timeline = write_html(events[:EVENTS], path)
            written.append(time.perf_counter() - begin)
        size = path.stat().st_size
        first = _first_frame_s(browser, path)
        copies = [event for event in play(1600, ranks=4, layers=8) if hasattr(event, "took_ns")][:EVENTS]
        assert len(copies) == EVENTS
        dense = len(write_html(copies, path).spans)
        first_dense = _first_frame_s(browser, path)
        large = _command(Path(folder))
    return [
        Figure("timeline of 100k events, first frame", first, 2.0, "s", f"{len(timeline.spans)} spans"),
        Figure("timeline of 100k forwards and copies, first frame", first_dense, 2.0, "s", f"{dense} spans"),
        Figure("timeline of 100k events, written", median(written), 20.0, "s", f"{size / 1e6:.1f} MB"),
        *large,
    ]


def _command(folder: Path) -> list[Figure]:
    """Measure `kvpipe trace timeline` with a large trace, in a process of its own."""
    trace, page = folder / "trace.jsonl", folder / "large.html"
    encoder, events = msgspec.json.Encoder(), play(REQUESTS, ranks=2, layers=8)
    with trace.open("wb") as out:
        out.writelines(encoder.encode(event) + b"\n" for event in events)
    beside = f"{trace.stat().st_size / 1e6:.0f} MB, {len(events)} events"
    command = [sys.executable, "-c", _MEASURED, "trace", "timeline", str(trace), "-o", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    seconds, kib = done.stdout.splitlines()[-1].split()
    return [
        Figure("kvpipe trace timeline of a large trace, processor time", float(seconds), 24.0, "s", beside),
        Figure("the same, peak memory", float(kib) / 1e3, 256.0, "MB", beside),
    ]


def _first_frame_s(browser: Browser, path: Path) -> float:
    """Return the median seconds from the start of the navigation to the end of the first complete drawing."""
    taken = []
    for _ in range(REPEATS):
        browser.open("about:blank")
        browser.open(path.as_uri())
        taken.append(float(browser.wait_for("return window.firstFrameMs")) / 1e3)
    return median(taken)
