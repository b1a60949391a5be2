"""A trace as a timeline: its spans, the file for Perfetto, and the page in a real browser."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import re
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpipe.statemachine import request
from kvpipe.trace import events as e
from kvpipe.trace.events import SCHEDULER, Event
from kvpipe.trace.perfetto import write_perfetto
from kvpipe.trace.timeline import LIFE, PHASES, REQUESTS, Timeline, spans
from kvpipe.trace.timeline_html import write_html
from tests.trace import browser as browser_module
from tests.trace.browser import ENTER, WINDOW, Browser, BrowserError, BrowserMissingError
from tests.trace.synthetic import MS, ORIGIN_NS, WALL_NS, play

EMPTY = "\u2013"
"""How an empty text is shown."""
HOSTILE = (
    "</script><img src=x onerror='window.pwned=1'>",
    "<!--<script>window.pwned=2</script>",
    "'\"><svg onload=window.pwned=3>",
    "\u2028]}</textarea>{{7*7}}",
)


def _at(
    ms: float, kind: type[Event], /, rank: int = SCHEDULER, *, epoch: int = 1, step: int = 0, **fields: Any
) -> Event:
    name, engine = str(fields.pop("request", "r")), str(fields.pop("engine", "e"))
    return kind(int(ms * MS), rank, name, epoch, step, int(ms * MS) + WALL_NS, engine, **fields)  # type: ignore[arg-type]


def _phases(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Every phase in order: what, from, to, in ms."""
    some = [span for span in timeline.spans if span.kind in PHASES]
    return [(s.kind, s.begin_ns / MS, s.end_ns / MS) for s in sorted(some, key=lambda s: s.begin_ns)]


def _only(timeline: Timeline, kind: str) -> list[Any]:
    return [span for span in timeline.spans if span.kind == kind]


def _moved(ms: float, was: str, now: str, *, step: int = 0, **fields: Any) -> Event:
    kind = e.kind_of("request", was, now)
    return _at(ms, kind, step=step, machine="request", cursor=1, on="x", was=was, now=now, **fields)


# ---- spans ----------------------------------------------------------------------------------------------------------


def test_a_request_has_its_phases() -> None:
    """Waiting, an async load, running, preempted, and a second admission that loads again."""
    timeline = spans(
        [
            _at(0, e.RequestAdded, step=0),
            _at(10, e.RequestAdmitted, step=3, load="load_async"),
            _at(10, e.LoadPlanned, step=3, job=1, kind="load_async"),
            _moved(11, request.ALLOCATED, request.LOADING, step=4),
            _at(20, e.Finalized, 0, step=4, machine="load", cursor=1),
            _moved(22, request.LOADING, request.RUNNING, step=5),
            _moved(30, request.RUNNING, request.PREEMPTED, step=6),
            _moved(40, request.PREEMPTED, request.ALLOCATED, step=7),
            _at(40, e.RequestReadmitted, step=7, epoch=2, load="load_async"),
            _at(40, e.LoadPlanned, step=7, epoch=2, job=2, kind="load_async"),
            _at(44, e.LeasesReturned, step=8, epoch=1, chunks=1),
            _at(46, e.LeasesReturned, step=8, epoch=2, chunks=1),
            _at(60, e.RequestDone, step=9, epoch=2, status="finished_stopped"),
        ]
    )
    assert _phases(timeline) == [
        ("waiting", 0, 10), ("loading", 10, 22), ("running", 22, 30), ("preempted", 30, 40), ("loading", 40, 46),
        ("running", 46, 60),
    ]  # fmt: skip
    (life,) = _only(timeline, LIFE)
    assert (life.name, life.begin_ns, life.end_ns, life.is_open) == ("r", 0, 60 * MS, False)
    assert [type(timeline.events[i]) for i in life.events] == [
        e.RequestAdded, e.RequestAdmitted, e.RequestReadmitted, e.RequestDone,
    ]  # fmt: skip
    marks = [(s.kind, s.begin_ns / MS) for s in timeline.spans if s.kind.endswith("_mark")]
    assert marks == [("preempted_mark", 30), ("resumed_mark", 40)]


def test_a_sync_load_is_not_a_phase() -> None:
    """Its request computes meanwhile."""
    timeline = spans(
        [
            _at(0, e.RequestAdded),
            _at(10, e.RequestAdmitted, load="load_sync"),
            _at(10, e.LoadPlanned, job=1, kind="load_sync"),
            _at(60, e.RequestDone),
        ]
    )
    assert _phases(timeline) == [("waiting", 0, 10), ("running", 10, 60)]


def test_a_load_ends_with_its_job() -> None:
    """When no transition says that the request runs: with the last rank's; without ranks, after `loading_ms`."""
    begin = [_at(0, e.RequestAdded), _at(10, e.RequestAdmitted, load="load_async")]
    planned = _at(10, e.LoadPlanned, job=1, kind="load_async")
    ranks = [_at(20 + rank, e.Finalized, rank, machine="load", cursor=1) for rank in range(2)]
    whole = spans([*begin, planned, *ranks, _at(60, e.RequestDone)])
    assert _phases(whole) == [("waiting", 0, 10), ("loading", 10, 21), ("running", 21, 60)]
    less = spans([*begin, _at(60, e.RequestDone, loading_ms=7.0)])
    assert _phases(less) == [("waiting", 0, 10), ("loading", 10, 17), ("running", 17, 60)]


def test_what_never_began() -> None:
    """Without its first event, a request begins when the first that is left says so."""
    first = _at(0, e.Started)
    waited = spans([first, _at(50, e.RequestAdmitted, waited_ms=20.0), _at(60, e.RequestDone)])
    assert _phases(waited) == [("waiting", 30, 50), ("running", 50, 60)]
    (life,) = _only(spans([first, _at(60, e.RequestDone, lived_ms=45.0)]), LIFE)
    assert (life.begin_ns, life.end_ns) == (15 * MS, 60 * MS)
    (life,) = _only(spans([first, _at(60, e.RequestDone, lived_ms=1e300)]), LIFE)
    assert (life.begin_ns, life.end_ns) == (0, 60 * MS)


def test_what_never_ended() -> None:
    """It lasts until the last event of its own engine, and says so."""
    timeline = spans(
        [
            _at(0, e.RequestAdded),
            _at(5, e.RequestAdmitted),
            _at(70, e.StepRan, 0, took_ns=MS),
            _at(90, e.StepRan, 0, engine="other"),
        ]
    )
    (life,) = _only(timeline, LIFE)
    assert (life.end_ns, life.is_open) == (70 * MS, True)
    assert _phases(timeline) == [("waiting", 0, 5), ("running", 5, 70)]
    assert [s.is_open for s in timeline.spans if s.kind in PHASES] == [False, True]


def test_an_id_is_used_again() -> None:
    """Each use is a life of its own, whether the former one ended or not."""
    for ended in (True, False):
        some = [_at(0, e.RequestAdded), _at(5, e.RequestAdmitted), _at(30, e.RequestAdded), _at(50, e.RequestDone)]
        lives = _only(spans([*some, *([_at(20, e.RequestDone)] if ended else [])]), LIFE)
        assert sorted((s.begin_ns // MS, s.end_ns // MS) for s in lives) == [(0, 20 if ended else 30), (30, 50)]
        assert [s.is_open for s in sorted(lives)] == [not ended, False]


def test_late_news_does_not_revive_a_request() -> None:
    """Leases may come back after the end, and a fault may name a request that is not in the trace."""
    timeline = spans(
        [
            _at(0, e.RequestAdded),
            _at(20, e.RequestDone),
            _at(30, e.LeasesReturned),
            _at(35, e.SavePlanned),
            _at(40, e.Fault, name="f"),
            _at(41, e.Fault, name="f", request="unknown"),
        ]
    )
    assert [span.end_ns for span in _only(timeline, LIFE)] == [20 * MS]
    assert [timeline.lanes[s.lane].name for s in _only(timeline, "fault_mark")] == ["marks", "marks"]


def test_copies_name_their_requests() -> None:
    """By the jobs they belong to, of their own engine; those that failed are another kind."""
    timeline = spans(
        [
            _at(0, e.SavePlanned, job=1, request="a"),
            _at(0, e.SavePlanned, job=1, request="z", engine="other"),
            _at(0, e.LayerLanded, 0, request="b", machine="save", cursor=2),
            _at(1, e.LayerCopied, 0, request="", kind="save", layer=3, jobs=[1, 2, 9], took_ns=MS),
            _at(2, e.LayerCopied, 0, request="c", kind="load_sync", layer=0, jobs=[4], took_ns=MS, failed=[4]),
        ]
    )
    (copy,) = _only(timeline, "save")
    assert (copy.name, copy.requests, copy.end_ns - copy.begin_ns) == ("layer 3", ("a", "b"), MS)
    (failed,) = _only(timeline, "copy_failed")
    assert (timeline.lanes[failed.lane].name, failed.requests) == ("loads", ("c",))


def test_evictions_of_a_step_are_one_mark() -> None:
    """They say how many."""
    timeline = spans([_at(i, e.Evicted, step=i // 3, machine="chunk", cursor=i) for i in range(5)])
    assert [(s.name, s.begin_ns) for s in timeline.spans] == [("evicted: 3", 0), ("evicted: 2", 3 * MS)]


def test_the_order_of_the_events_does_not_matter() -> None:
    """Files of several processes are read one after the other."""
    some = play(25)
    shuffled = list({(event.t_ns, type(event), event.rank, i): event for i, event in enumerate(some)}.values())
    random.Random(1).shuffle(shuffled)
    shuffled.sort(key=lambda event: event.rank)  # as files are
    first = some[:]
    first.sort(key=lambda event: event.t_ns)
    assert _said(spans(first)) == _said(spans(sorted(shuffled, key=lambda event: -event.t_ns)))


def _said(timeline: Timeline) -> list[object]:
    lives = sorted((s.name, s.begin_ns, s.end_ns, s.is_open) for s in timeline.spans if s.kind == LIFE)
    others = sorted((s.kind, s.begin_ns, s.end_ns, s.requests) for s in timeline.spans if s.layer == 0)
    return [timeline.lanes, lives, others, timeline.duration_ns]


def test_lanes_and_rows() -> None:
    """Each engine's scheduler is above its ranks; in a row nothing overlaps, and rows are used again."""
    timeline = spans(play(40, ranks=2, engine="b") + play(10, ranks=1, engine="a"))
    sides = [(lane.engine, lane.rank, lane.name) for lane in timeline.lanes]
    assert [side for side in sides if side[2] in {REQUESTS, "forward"}] == [
        ("a", -1, "requests"), ("a", 0, "forward"), ("b", -1, "requests"), ("b", 0, "forward"), ("b", 1, "forward"),
    ]  # fmt: skip
    ends: dict[tuple[int, int, int], int] = defaultdict(int)
    for span in timeline.spans:  # by lane, row, layer and time
        here = (span.lane, span.row, span.layer)
        assert 0 <= span.row < timeline.lanes[span.lane].rows
        assert span.layer == 2 or span.begin_ns >= ends[here]
        assert span.end_ns >= span.begin_ns
        ends[here] = max(ends[here], span.end_ns)
    lives = [span for span in timeline.spans if span.kind == LIFE and timeline.lanes[span.lane].engine == "b"]
    at_once = max(sum(s.begin_ns <= one.begin_ns < s.end_ns for s in lives) for one in lives)
    assert len(lives) == 40
    assert {timeline.lanes[s.lane].rows for s in lives} == {at_once}


def test_phases_lie_in_their_life() -> None:
    """One after the other and without gaps; marks stand in the row of their request."""
    timeline = spans(play(60))
    for life in _only(timeline, LIFE):
        own = [s for s in timeline.spans if s.kind in PHASES and s.requests == life.requests]
        assert (own[0].begin_ns, own[-1].end_ns) == (life.begin_ns, life.end_ns)
        assert all(a.end_ns == b.begin_ns for a, b in pairwise(own))
        assert {(s.lane, s.row) for s in own} == {(life.lane, life.row)}
    preempted = _only(timeline, "preempted_mark")
    assert preempted
    assert all((s.lane, s.row) in {(p.lane, p.row) for p in _only(timeline, "preempted")} for s in preempted)


def test_clocks_of_several_hosts_are_aligned() -> None:
    """By the wall clock, where the monotonic clocks stand far apart; else by the monotonic clock alone."""
    here = _at(5000, e.StepRan, 0, step=1)
    there = e.StepRan(77, 1, "", 0, 1, here.wall_ns + 3 * MS, "e", took_ns=MS)
    near = e.StepRan(here.t_ns + 4 * MS, 2, "", 0, 1, here.wall_ns + 6 * MS, "e", took_ns=MS)
    timeline = spans([here, there, near])
    assert [(timeline.lanes[s.lane].rank, s.begin_ns) for s in timeline.spans] == [(0, 0), (1, 3 * MS), (2, 4 * MS)]
    assert (timeline.origin_ns, timeline.wall_ns) == (here.t_ns, here.wall_ns)


def _odd_events() -> list[Event]:
    """Every event with values that no sane engine writes."""
    odd: dict[type, list[Any]] = {
        int: [0, -1, 1 << 62, -(1 << 70), 1 << 80],
        float: [0.0, -1.0, float("nan"), float("inf"), 1e308],
        str: ["", "\x00\ud800", HOSTILE[0]],
        bool: [True, False],
    }
    rng, made = random.Random(3), list[Event]()
    for kind in e.EVENTS.values():
        for _ in range(40):
            fields = {
                field.name: rng.choice(odd.get(field.type, [msgspec.NODEFAULT]))
                for field in msgspec.structs.fields(kind)
            }
            made.append(kind(**{name: value for name, value in fields.items() if value is not msgspec.NODEFAULT}))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_odd_data_do_no_harm(seed: int, tmp_path: Path) -> None:
    """Nothing raises on nonsense, on parts of a trace, or on no trace at all; what is written is JSON."""
    rng = random.Random(seed)
    some = play(20, seed=seed)
    odd = _odd_events()
    for events in (
        [],
        odd,
        rng.sample(some, len(some) // 3),
        [*rng.sample(some, 500), *rng.sample(odd, 300)],
        some[:1],
    ):
        timeline = write_html(iter(events), tmp_path / "page.html")
        assert all(span.end_ns >= span.begin_ns >= 0 for span in timeline.spans)
        _embedded(tmp_path / "page.html")
        write_perfetto(iter(events), tmp_path / "trace.json")
        json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"), parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


# ---- the files ------------------------------------------------------------------------------------------------------


def _embedded(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', text, re.DOTALL)
    return json.loads(data, parse_constant=_refuse)


def test_the_page_has_the_whole_trace(tmp_path: Path) -> None:
    """Its columns, and every field of what it shows; numbers that JavaScript would round are text."""
    events = [*play(10), _at(ORIGIN_NS / MS, e.CacheReset, chunks=(1 << 53) + 1)]
    timeline = write_html(events, tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    assert sum(track[3] for track in data["tracks"]) == len(timeline.spans) == len(data["spans"]["begin"])
    assert [data["strings"][i] for i in data["spans"]["name"]] == [span.name for span in timeline.spans]
    tables = {table["tag"]: table for table in data["shown"]}
    assert tables["cache_reset"]["fields"]["chunks"] == ["one", str((1 << 53) + 1)]
    assert set(tables["layer_copied"]["fields"]) == set(e.LayerCopied.__struct_fields__)
    copies = [event for event in timeline.events if isinstance(event, e.LayerCopied)]
    assert tables["layer_copied"]["fields"]["took_ns"] == ["each", [event.took_ns for event in copies]]


def test_nothing_in_the_data_can_leave_it(tmp_path: Path) -> None:
    """The data have no tags, and the page's policy runs the template's own script and nothing else."""
    page = tmp_path / "page.html"
    write_html([_at(i, e.RequestAdded, request=name, traceparent=name) for i, name in enumerate(HOSTILE)], page)
    data = _embedded(page)
    assert set(HOSTILE) <= set(data["strings"])
    text = page.read_text(encoding="utf-8")
    inside = text[text.index('id="trace">') + len('id="trace">') : text.rindex("<script>")]
    assert inside.count("<") == 1  # of </script>
    assert inside.isascii()
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=\"?(?!data:)\w", text.replace(inside, ""))


def test_perfetto(tmp_path: Path) -> None:
    """Processes and threads have names, spans of a thread are nested, requests' spans are balanced, times are in us."""
    path = tmp_path / "trace.json"
    timeline = write_perfetto(play(40, ranks=2), path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"].endswith("_name")}
    assert {"e1 scheduler", "e1 rank 0", "e1 rank 1", "forward", "loads", "saves", "saves 2"} <= set(names.values())
    ends: dict[tuple[int, int], float] = defaultdict(float)
    open_ids: dict[int, list[str]] = defaultdict(list)
    before = 0.0
    for one in events:
        assert one["ts"] >= before
        before = one["ts"]
        assert (one["pid"], 0) in names
        if one["ph"] == "X":
            assert one["ts"] >= ends[one["pid"], one["tid"]] - 1e-3
            ends[one["pid"], one["tid"]] = one["ts"] + one["dur"]
        elif one["ph"] == "b":
            open_ids[one["id"]].append(one["name"])
        elif one["ph"] == "e":
            assert open_ids[one["id"]].pop() == one["name"]
    assert len(open_ids) == 40
    assert not any(open_ids.values())
    step = next(one for one in events if one["ph"] == "X" and one["cat"] == "forward")
    truth = min((span for span in timeline.spans if span.kind == "forward"), key=lambda span: span.begin_ns)
    assert (step["ts"], step["dur"]) == (truth.begin_ns / 1e3, (truth.end_ns - truth.begin_ns) / 1e3)
    assert step["args"]["took_ns"] == truth.end_ns - truth.begin_ns
    assert sum(one["ph"] == "i" for one in events) == sum(span.layer == 2 for span in timeline.spans) > 0


# ---- the page in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Browser]:
    """One browser for all tests: it takes seconds to start."""
    with Browser() as browser:
        yield browser


class Page:
    """One page that is open in the browser."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self.browser, self.path = browser, path

    def show(self, events: list[Event]) -> Timeline:
        """Write the page and open it; wait for its first frame, unless it has nothing to draw."""
        timeline = write_html(events, self.path)
        self.browser.open(self.path.as_uri())
        self.browser.wait_for("return window.firstFrameMs > 0")
        assert self.browser.run("return window.timeline.spans") == len(timeline.spans)
        return timeline

    def visible(self) -> tuple[float, float]:
        """The range of time that is shown, in ms."""
        seen = self.browser.run("return window.timeline.visible()")
        return seen["from_ms"], seen["to_ms"]

    def where(self, kind: str, number: int = 0) -> Any:
        """Return the n-th span of a kind: what it is, and where it is drawn."""
        return self.browser.run(
            "const all = []; for (let i = 0; i < window.timeline.spans; i++) {"
            "  const one = window.timeline.span(i); if (one.kind === arguments[0]) all.push({...one, i}); }"
            "return all[arguments[1]]",
            kind,
            number,
        )

    def pixels(self, colour: str) -> int:
        """How many pixels of the canvas have a colour of the style sheet."""
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
        """Wait until what was asked for is drawn."""
        self.browser.run("window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => window.drawn = 1))")
        self.browser.wait_for("return window.drawn")

    def text(self, id_: str) -> str:
        """What an element says."""
        return str(self.browser.run("return document.getElementById(arguments[0]).innerText", id_))


@pytest.fixture
def page(shared: Browser, tmp_path: Path) -> Iterator[Page]:
    """A page, which must not ask the network for anything nor complain."""
    one = Page(shared, tmp_path / "timeline.html")
    yield one
    assert shared.complaints() == []
    assert set(shared.requested()) <= {one.path.as_uri()}
    assert shared.run("return window.pwned ?? null") is None
    shared.open("about:blank")
    shared.requested()


def _rows_of_pixels(png: bytes) -> tuple[tuple[int, int], list[bytes]]:
    """Size of a picture, and its rows as they are compressed: those of a blank one are all the same."""
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
    """The whole of it, in the colours of its kinds, with its lanes and facts."""
    timeline = page.show(play(8))
    size, rows = _rows_of_pixels(page.browser.screenshot())
    assert size == WINDOW
    assert len(set(rows)) > 100
    for colour in ("running", "waiting", "forward", "load", "save"):
        assert page.pixels(colour) > 300, colour
    low, high = page.visible()
    assert low <= 0 < timeline.duration_ns / MS <= high
    assert page.browser.run("return window.timeline.lanes") == len(timeline.lanes)
    assert f"{timeline.total} events".replace(",", "") in page.text("facts").replace(",", "")
    assert "8 requests" in page.text("facts")
    assert "save of a layer" in page.text("legend")


def test_spans_under_a_pixel_are_merged(page: Page) -> None:
    """Thousands to a pixel are one rectangle without holes, and few of them are looked at."""
    page.show([_at(0, e.StepRan, 0, took_ns=MS)])
    alone = page.pixels("forward")
    assert alone > 10_000
    page.show([_at(i, e.StepRan, 0, took_ns=MS) for i in range(50_000)])
    assert page.pixels("forward") == pytest.approx(alone, rel=0.02)  # the lone one says which step it is
    assert page.browser.run("return window.timeline.visible().looked") < 2 * WINDOW[0]
    page.browser.run("window.timeline.zoomTo(40000, 40010)")
    page.drawn()
    assert page.browser.run("return window.timeline.visible().looked") < 15


def test_search_highlights_and_counts(page: Page) -> None:
    """All of a request stays as it is, its copies too; the rest is dimmed. Enter goes on to the next."""
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
        page.browser.press([ENTER])
        assert page.text("count") == f"{(number - 1) % 10 + 1} of 10"
        seen.append(page.browser.run("return window.timeline.span(window.timeline.selected()).name"))
    assert seen == [f"chatcmpl-e1-{i % 10:05d}" for i in range(11)]
    page.browser.run("window.timeline.search('nobody')")
    assert page.text("count") == "no match"
    page.browser.run("window.timeline.search(''); window.timeline.select(-1); window.timeline.zoomTo(-1e9, 1e9)")
    page.drawn()
    assert page.pixels("save") > before * 0.9


def test_zoom_and_pan(page: Page) -> None:
    """The wheel zooms around the pointer; dragging and the arrow keys pan; 0 shows all again."""
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
    page.browser.press(["\ue014"])  # right
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
    """Of a forward: its event's fields with their exact values. Of a request: its events, and a way to highlight it."""
    timeline = page.show(play(6))
    forward = page.where("forward", 2)
    page.browser.click(forward["x"], forward["y"])
    assert page.browser.run("return window.timeline.selected()") == forward["i"]
    truth = timeline.spans[forward["i"]]
    event = timeline.events[truth.events[0]]
    assert isinstance(event, e.StepRan)
    said = re.sub(r"\s+", " ", page.text("panel"))
    assert f"Forward, step {event.step}" in said
    for field in e.StepRan.__struct_fields__:
        assert f"{field} {getattr(event, field) or (EMPTY if field == 'request' else 0)}" in said, field
    assert f"begin {truth.begin_ns / MS:,.3f} ms" in said
    wall = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.wall_ns // 10**9))
    assert f"{wall}.{event.wall_ns // 1000 % 10**6:06d} UTC" in said
    page.browser.hover(forward["x"] + 1, forward["y"])
    life = page.where(LIFE, 1)
    page.browser.click(life["x"], life["y"])
    said = page.text("panel")
    assert f"{life['name']}\nrequest, engine e1, scheduler" in said
    assert life["name"] in page.text("tip")
    assert all(tag in said for tag in ("request_added", "request_admitted", "request_done", "being_saved"))
    page.browser.run("document.querySelector('#panel .link').click()")
    assert page.text("count") == "1 found"
    page.browser.click(700, 80)  # the axis: nothing there
    page.browser.press(["\ue00c", "\ue00c"])  # escape: the search, then the details
    assert page.browser.run("return window.timeline.selected()") == -1
    assert page.browser.run("return document.getElementById('panel').hidden")


def test_what_never_ended_is_said_to_be_open(page: Page) -> None:
    """In the details, and at its end in the lane."""
    ended = [_at(0, e.RequestAdded), _at(1, e.RequestAdmitted), _at(100, e.RequestDone)]
    page.show(ended)
    whole = page.pixels("running")
    page.show([*ended[:2], _at(100, e.StepRan, 0)])
    assert whole - 100 < page.pixels("running") < whole - 10
    life = page.where(LIFE)
    page.browser.click(life["x"], life["y"])
    said = re.sub(r"\s+", " ", page.text("panel"))
    assert "end not in this trace duration at least 100.000 ms" in said


def test_hostile_ids_do_not_run(page: Page) -> None:
    """They are text wherever they are shown: in the lanes, the details, the tip and the search."""
    events = play(5)
    for i, name in enumerate(HOSTILE):
        begin = ORIGIN_NS / MS + 5 * i
        events.append(_at(begin, e.RequestAdded, request=name, engine=name, traceparent=name))
        events.append(_at(begin + 4, e.RequestDone, request=name, engine=name, status=name))
        events.append(_at(begin + 4, e.Fault, request="", engine=name, name=name, fields={name: name}))
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


def test_an_empty_trace_says_so(page: Page) -> None:
    """In a sentence, without an error."""
    page.show([])
    assert "This trace has no requests" in page.text("empty")
    assert page.browser.run("return document.getElementById('empty').offsetHeight") > 400
    page.show(play(3))
    assert page.browser.run("return document.getElementById('empty').hidden")


def test_one_hundred_thousand_events(page: Page) -> None:
    """They are drawn, and so is any part of them."""
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
    """So that whoever sees the failure knows what to install."""
    monkeypatch.setattr(browser_module, "DRIVER", "/nonexistent/chromedriver")
    with pytest.raises(BrowserMissingError, match="apt-get install chromium chromium-driver"), Browser():
        pass


def test_no_process_is_left_behind() -> None:
    """Also when the test fails."""
    profile = ""
    try:
        with Browser(dark=True) as browser:
            profile = str(browser._profile)
            assert _processes(profile)
            assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
            browser.run("throw new Error('as a failing test does')")
    except BrowserError:
        pass
    assert profile
    until = time.monotonic() + 5
    while _processes(profile) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _processes(profile)
    assert not Path(profile).exists()


def _processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
