"""The timeline's page in a real browser."""

from __future__ import annotations

import contextlib
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Keys

from kvpipe.testing.waiting import eventually
from kvpipe.trace import events as e
from kvpipe.trace.events import Event
from kvpipe.trace.spans import LIFE, Timeline
from kvpipe.trace.timeline_html import write_html
from tests.rigs import browser as browser_module
from tests.rigs.browser import WINDOW, Browser, BrowserMissingError
from tests.rigs.synthetic_trace import HOSTILE, MS, ORIGIN_NS, moment, play

EMPTY = "\u2013"
"""The text that the page shows for an empty field."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Browser]:
    """Yield one browser for all tests, because its start takes seconds."""
    with Browser() as browser:
        yield browser


class Page:
    """The page of one timeline, open in the browser."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self.browser, self.path = browser, path

    def show(self, events: list[Event]) -> Timeline:
        """Write the page and open it. Wait until the page has drawn its first frame and nothing moves any more."""
        timeline = write_html(events, self.path)
        self.browser.open(self.path.as_uri())
        self.browser.wait_for("return window.firstFrameMs > 0")
        self.drawn()
        assert self.browser.run("return window.timeline.spans") == len(timeline.spans)
        return timeline

    def visible(self) -> tuple[float, float]:
        """The shown range of time, in ms."""
        seen = self.browser.run("return window.timeline.visible()")
        return seen["from_ms"], seen["to_ms"]

    def where(self, kind: str, number: int = 0) -> Any:
        """Return the n-th span of a kind: its data, and its place in the picture."""
        return self.browser.run(
            "const all = []; for (let i = 0; i < window.timeline.spans; i++) {"
            "  const one = window.timeline.span(i); if (one.kind === arguments[0]) all.push({...one, i}); }"
            "return all[arguments[1]]",
            kind,
            number,
        )

    def pixels(self, colour: str) -> int:
        """Return the number of pixels of the canvas that have a colour of the style sheet."""
        count = self.browser.run(
            "const canvas = document.getElementById('canvas'), copy = document.createElement('canvas');"
            "copy.width = canvas.width; copy.height = canvas.height + 1;"
            "const c = copy.getContext('2d', {willReadFrequently: true}); c.drawImage(canvas, 0, 0);"
            "c.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]);"
            "c.fillRect(0, canvas.height, 1, 1); let n = 0;"
            "const [r, g, b] = c.getImageData(0, canvas.height, 1, 1).data;"
            "const all = c.getImageData(0, 0, canvas.width, canvas.height).data;"
            "for (let k = 0; k < all.length; k += 4) n += all[k] === r && all[k + 1] === g && all[k + 2] === b;"
            "return n",
            colour,
        )
        assert isinstance(count, int)
        return count

    def drawn(self) -> None:
        """Wait until the last change is drawn."""
        self.browser.run("window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => window.drawn = 1))")
        self.browser.wait_for("return window.drawn")

    def text(self, id_: str) -> str:
        """Return the text that an element shows."""
        return str(self.browser.run("return document.getElementById(arguments[0]).innerText", id_))


@pytest.fixture
def page(shared: Browser, tmp_path: Path) -> Iterator[Page]:
    """Yield a page. At the end, check that it has not used the network and has written no error to the console."""
    one = Page(shared, tmp_path / "timeline.html")
    yield one
    assert shared.complaints() == []
    assert set(shared.requested()) <= {one.path.as_uri()}
    assert shared.run("return window.pwned ?? null") is None
    shared.open("about:blank")
    shared.requested()


def _rows_of_pixels(png: bytes) -> tuple[tuple[int, int], list[bytes]]:
    """Return the size of a picture, and its rows. The rows of a blank picture are equal."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    size, data, at = struct.unpack(">II", png[16:24]), b"", 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += length + 12
    rows = zlib.decompress(data)
    wide = len(rows) // size[1]
    return (size[0], size[1]), [rows[i : i + wide] for i in range(0, len(rows), wide)]


def test_a_trace_is_drawn(page: Page) -> None:
    """The page draws all spans in the colours of their kinds. It shows the lanes and the facts of the trace."""
    timeline = page.show(play(8))

    def shows_lanes() -> bool:  # on a busy machine, the first screenshots may be older than the drawing
        size, rows = _rows_of_pixels(page.browser.screenshot())
        return size == WINDOW and len(set(rows)) > 100

    assert eventually(shows_lanes)
    for colour in ("running", "waiting", "forward", "load", "save"):
        assert page.pixels(colour) > 300, colour
    low, high = page.visible()
    assert low <= 0 < timeline.duration_ns / MS <= high
    assert page.browser.run("return window.timeline.lanes") == len(timeline.lanes)
    assert f"{timeline.total} events".replace(",", "") in page.text("facts").replace(",", "")
    assert "8 requests" in page.text("facts")
    assert "save of a layer" in page.text("legend")


def test_spans_under_a_pixel_are_merged(page: Page) -> None:
    """Thousands of spans in one pixel are drawn as one rectangle without gaps. Not every span is visited."""
    page.show([moment(0, e.StepRan, 0, took_ns=MS)])
    alone = page.pixels("forward")
    assert alone > 10_000
    page.show([moment(i, e.StepRan, 0, took_ns=MS) for i in range(50_000)])
    # a span drawn alone also has a label with its step's number
    assert page.pixels("forward") == pytest.approx(alone, rel=0.02)
    assert page.browser.run("return window.timeline.visible().looked") < 2 * WINDOW[0]
    page.browser.run("window.timeline.zoomTo(40000, 40010)")
    page.drawn()
    assert page.browser.run("return window.timeline.visible().looked") < 15


def test_search_highlights_and_counts(page: Page) -> None:
    """The spans and copies of a found request stay bright. All other spans are dimmed.

    Enter selects the next match.
    """
    timeline = page.show(play(12))
    before = page.pixels("save")
    wanted = "chatcmpl-e1-00003"
    page.browser.run("document.getElementById('search').focus()")
    page.browser.press(wanted)
    page.drawn()
    found = page.browser.run("return window.timeline.search(arguments[0])", wanted)
    assert found == {"matches": 1, "spans": sum(wanted in span.requests for span in timeline.spans)}
    assert found["spans"] > 5
    assert 0 < page.pixels("save") < before / 2
    assert page.text("count") == "1 found"
    page.browser.run("window.timeline.search('e1-0000')")
    assert page.text("count") == "10 found"
    seen = []
    for number in range(1, 12):
        page.browser.press([Keys.ENTER])
        assert page.text("count") == f"{(number - 1) % 10 + 1} of 10"
        seen.append(page.browser.run("return window.timeline.span(window.timeline.selected()).name"))
    assert seen == [f"chatcmpl-e1-{i % 10:05d}" for i in range(11)]
    page.browser.run("window.timeline.search('nobody')")
    assert page.text("count") == "no match"
    page.browser.run("window.timeline.search(''); window.timeline.select(-1); window.timeline.zoomTo(-1e9, 1e9)")
    page.drawn()
    assert page.pixels("save") > before * 0.9


def test_zoom_and_pan(page: Page) -> None:
    """The wheel zooms around the pointer, dragging and the arrow keys pan, and 0 shows the whole trace."""
    page.show(play(12))
    whole = page.visible()
    x, y = 800, 300
    share = page.browser.run("return (arguments[0] - 148) / (document.getElementById('canvas').clientWidth - 160)", x)
    page.browser.wheel(x, y, -600)
    low, high = page.visible()
    assert high - low < (whole[1] - whole[0]) * 0.7
    fixed = whole[0] + (whole[1] - whole[0]) * share
    assert low + (high - low) * share == pytest.approx(fixed, abs=(high - low) * 0.01)
    page.browser.drag(x, y, x + 100, y)
    dragged = page.visible()
    assert dragged[0] < low
    assert dragged[1] - dragged[0] == pytest.approx(high - low)
    page.browser.press([Keys.ARROW_RIGHT])
    assert page.visible()[0] > dragged[0]
    page.browser.press(["+"])
    closer = page.visible()
    assert closer[1] - closer[0] < (high - low) * 0.9
    page.browser.press(["-"])
    assert page.visible()[1] - page.visible()[0] > (closer[1] - closer[0]) * 1.1
    page.browser.press(["0"])
    assert page.visible() == pytest.approx(whole)
    page.browser.run("window.timeline.zoomTo(10, 20)")
    assert page.visible() == pytest.approx((10, 20))


def test_a_click_shows_details(page: Page) -> None:
    """A click on a forward shows the exact fields of its event. A click on a request shows its events."""
    timeline = page.show(play(6))
    forward = page.where("forward", 2)
    page.browser.click(forward["x"], forward["y"])
    assert page.browser.run("return window.timeline.selected()") == forward["i"]
    truth = timeline.spans[forward["i"]]
    event = timeline.events[truth.events[0]]
    assert isinstance(event, e.StepRan)
    message = re.sub(r"\s+", " ", page.text("panel"))
    assert f"Forward, step {event.step}" in message
    for field in e.StepRan.__struct_fields__:
        assert f"{field} {getattr(event, field) or (EMPTY if field == 'request' else 0)}" in message, field
    assert f"begin {truth.begin_ns / MS:,.3f} ms" in message
    wall = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.wall_ns // 10**9))
    assert f"{wall}.{event.wall_ns // 1000 % 10**6:06d} UTC" in message
    page.browser.hover(forward["x"] + 1, forward["y"])
    life = page.where(LIFE, 1)
    page.browser.click(life["x"], life["y"])
    message = page.text("panel")
    assert f"{life['name']}\nrequest, engine e1, scheduler" in message
    assert life["name"] in page.text("tip")
    assert all(tag in message for tag in ("request_added", "request_admitted", "request_done", "being_saved"))
    page.browser.run("document.querySelector('#panel .link').click()")
    assert page.text("count") == "1 found"
    page.browser.click(700, 80)  # this place on the axis is empty
    page.browser.press([Keys.ESCAPE, Keys.ESCAPE])  # the first key ends the search, the second one closes the details
    assert page.browser.run("return window.timeline.selected()") == -1
    assert page.browser.run("return document.getElementById('panel').hidden")


def test_span_without_an_end_is_shown_as_open(page: Page) -> None:
    """The details mark a span without an end as open, and so does the end of the span in its lane."""
    ended = [moment(0, e.RequestAdded), moment(1, e.RequestAdmitted), moment(100, e.RequestDone)]
    page.show(ended)
    whole = page.pixels("running")
    page.show([*ended[:2], moment(100, e.StepRan, 0)])
    assert whole - 100 < page.pixels("running") < whole - 10
    life = page.where(LIFE)
    page.browser.click(life["x"], life["y"])
    message = re.sub(r"\s+", " ", page.text("panel"))
    assert "end not in this trace duration at least 100.000 ms" in message


def test_hostile_ids_do_not_run(page: Page) -> None:
    """Hostile ids are shown as text in the lanes, the details, the tooltip and the search."""
    events = play(5)
    for i, name in enumerate(HOSTILE):
        begin = ORIGIN_NS / MS + 5 * i
        events.append(moment(begin, e.RequestAdded, request=name, engine=name, traceparent=name))
        events.append(moment(begin + 4, e.RequestDone, request=name, engine=name, status=name))
        events.append(moment(begin + 4, e.Fault, request="", engine=name, name=name, fields={name: name}))
    timeline = page.show(events)
    for name in HOSTILE:
        assert page.browser.run("return window.timeline.search(arguments[0])", name)["matches"] == 1
        for i, span in enumerate(timeline.spans):
            if timeline.lanes[span.lane].engine == name and span.layer != 1:
                page.browser.run("window.timeline.select(arguments[0])", i)
                at = page.browser.run("return window.timeline.span(arguments[0])", i)
                page.browser.hover(at["x"], at["y"])
                assert name.replace("\u2028", "") in page.text("panel").replace("\u2028", "").replace("\n", "")
    assert page.browser.run("return document.querySelectorAll('img, svg, script').length") == 1


def test_an_empty_trace_reports_it(page: Page) -> None:
    """An empty trace gives a page with a message, without an error."""
    page.show([])
    assert "This trace has no requests" in page.text("empty")
    assert page.browser.run("return document.getElementById('empty').offsetHeight") > 400
    page.show(play(3))
    assert page.browser.run("return document.getElementById('empty').hidden")


def test_one_hundred_thousand_events(page: Page) -> None:
    """A trace of 100,000 events is drawn, both the whole trace and a part of it."""
    events = play(600, ranks=2, layers=8)
    assert len(events) >= 100_000
    timeline = page.show(events)
    assert page.pixels("save") > 5000
    page.browser.run("window.timeline.zoomTo(1000, 1010)")
    page.drawn()
    assert page.pixels("forward") > 1000
    last = len(timeline.spans) - 1
    page.browser.run("window.timeline.select(arguments[0])", last)
    at, (low, high) = page.browser.run("return window.timeline.span(arguments[0])", last), page.visible()
    assert low <= at["begin_ms"] <= at["end_ms"] <= high
    assert 0 < at["y"] < WINDOW[1]


# ---- the browser's helper -------------------------------------------------------------------------------------------


def test_a_missing_browser_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the packages to install."""
    monkeypatch.setattr(browser_module, "DRIVER", "/nonexistent/chromedriver")
    with pytest.raises(BrowserMissingError, match="apt-get install chromium chromium-driver"), Browser():
        pass


def test_a_browser_that_ends_at_once_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is repeated a few times. The last error has the browser's output."""
    tried: list[Path] = []

    def fails(self: Browser) -> None:
        tried.append(self._profile)
        raise WebDriverException("session not created")

    monkeypatch.setattr(Browser, "_options", fails)
    with pytest.raises(WebDriverException, match="session not created"), Browser():
        pass
    assert len(set(tried)) == browser_module.STARTS_MAX
    assert not any(path.exists() for path in tried)


def test_no_process_is_left_behind() -> None:
    """When a test fails, all processes of the browser end."""
    profile = ""
    with pytest.raises(WebDriverException, match="as a failing test does"), Browser(dark=True) as browser:  # noqa: PT012
        profile = str(browser._profile)
        assert _processes(profile)
        assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
        browser.run("throw new Error('as a failing test does')")
    assert eventually(lambda: not _processes(profile), every_s=0.05)
    assert not Path(profile).exists()


def _processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
