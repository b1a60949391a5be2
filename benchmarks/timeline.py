"""How long the page of a trace of 100k events takes: to be written, and to be drawn by a real browser."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.report import Figure
from kvpipe.testing.browser import Browser
from kvpipe.testing.synthetic_trace import play
from kvpipe.trace.timeline_html import write_html

EVENTS = 100_000
REPEATS = 5


def run() -> list[Figure]:
    """Measure both; a trace of all kinds of events, and one of forwards and copies alone, as dense as they come."""
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
    return [
        Figure("timeline of 100k events, first frame", first, 2.0, "s", f"{len(timeline.spans)} spans"),
        Figure("timeline of 100k forwards and copies, first frame", first_dense, 2.0, "s", f"{dense} spans"),
        Figure("timeline of 100k events, written", median(written), 20.0, "s", f"{size / 1e6:.1f} MB"),
    ]


def _first_frame_s(browser: Browser, path: Path) -> float:
    """Median seconds from the beginning of the navigation to the end of the first complete draw."""
    taken = []
    for _ in range(REPEATS):
        browser.open("about:blank")
        browser.open(path.as_uri())
        taken.append(float(browser.wait_for("return window.firstFrameMs")) / 1e3)
    return median(taken)
