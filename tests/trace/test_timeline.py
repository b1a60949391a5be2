"""Tests of a trace as a timeline: its spans, the file for Perfetto, and the data of the page."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpipe.statemachine import request
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.events import Event
from kvpipe.trace.perfetto import write_perfetto
from kvpipe.trace.reader import Trace
from kvpipe.trace.spans import LIFE, PHASES, REQUESTS, Timeline
from kvpipe.trace.timeline import spans
from kvpipe.trace.timeline_html import write_html
from tests.rigs.synthetic_trace import HOSTILE, MS, ORIGIN_NS, moment, play


def _phases(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Return every phase in order as (name, begin, end), in ms."""
    some = [span for span in timeline.spans if span.kind in PHASES]
    return [(s.kind, s.begin_ns / MS, s.end_ns / MS) for s in sorted(some, key=lambda s: s.begin_ns)]


def _only(timeline: Timeline, kind: str) -> list[Any]:
    return [span for span in timeline.spans if span.kind == kind]


def _moved(ms: float, was: str, now: str, *, step: int = 0, **fields: Any) -> Event:
    kind = transitions.event_of_move("request", was, now)
    return moment(ms, kind, step=step, machine="request", cursor=1, on="x", was=was, now=now, **fields)


# ---- spans ----------------------------------------------------------------------------------------------------------


def test_a_request_has_its_phases() -> None:
    """A request waits, loads, runs, is preempted, loads again and runs again. Each of these times is a phase."""
    timeline = spans(
        [
            moment(0, e.RequestAdded, step=0),
            moment(10, e.RequestAdmitted, step=3, load="load_async"),
            moment(10, e.LoadPlanned, step=3, job=1, kind="load_async"),
            _moved(11, request.ALLOCATED, request.LOADING, step=4),
            moment(20, transitions.Finalized, 0, step=4, machine="load", cursor=1),
            _moved(22, request.LOADING, request.RUNNING, step=5),
            _moved(30, request.RUNNING, request.PREEMPTED, step=6),
            _moved(40, request.PREEMPTED, request.ALLOCATED, step=7),
            moment(40, e.RequestReadmitted, step=7, epoch=2, load="load_async"),
            moment(40, e.LoadPlanned, step=7, epoch=2, job=2, kind="load_async"),
            moment(44, e.LeasesReturned, step=8, epoch=1, chunks=1),
            moment(46, e.LeasesReturned, step=8, epoch=2, chunks=1),
            moment(60, e.RequestDone, step=9, epoch=2, status="finished_stopped"),
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
    """During a sync load the request is computed, so this load is no phase."""
    timeline = spans(
        [
            moment(0, e.RequestAdded),
            moment(10, e.RequestAdmitted, load="load_sync"),
            moment(10, e.LoadPlanned, job=1, kind="load_sync"),
            moment(60, e.RequestDone),
        ]
    )
    assert _phases(timeline) == [("waiting", 0, 10), ("running", 10, 60)]


def test_a_load_ends_with_its_job() -> None:
    """If the trace has no transition of the request, a load ends with the last rank's job.

    Without such a job, it ends after `loading_ms`.
    """
    begin = [moment(0, e.RequestAdded), moment(10, e.RequestAdmitted, load="load_async")]
    planned = moment(10, e.LoadPlanned, job=1, kind="load_async")
    ranks = [moment(20 + rank, transitions.Finalized, rank, machine="load", cursor=1) for rank in range(2)]
    whole = spans([*begin, planned, *ranks, moment(60, e.RequestDone)])
    assert _phases(whole) == [("waiting", 0, 10), ("loading", 10, 21), ("running", 21, 60)]
    less = spans([*begin, moment(60, e.RequestDone, loading_ms=7.0)])
    assert _phases(less) == [("waiting", 0, 10), ("loading", 10, 17), ("running", 17, 60)]


def test_request_without_a_beginning_begins_at_its_first_event() -> None:
    """If the trace lacks a request's beginning, the request begins at its first event in the trace."""
    first = moment(0, e.Started)
    waited = spans([first, moment(50, e.RequestAdmitted, waited_ms=20.0), moment(60, e.RequestDone)])
    assert _phases(waited) == [("waiting", 30, 50), ("running", 50, 60)]
    (life,) = _only(spans([first, moment(60, e.RequestDone, lived_ms=45.0)]), LIFE)
    assert (life.begin_ns, life.end_ns) == (15 * MS, 60 * MS)
    (life,) = _only(spans([first, moment(60, e.RequestDone, lived_ms=1e300)]), LIFE)
    assert (life.begin_ns, life.end_ns) == (0, 60 * MS)


def test_request_without_an_end_is_marked_as_open() -> None:
    """A request without an end lasts until its engine's last event, and is marked as open."""
    timeline = spans(
        [
            moment(0, e.RequestAdded),
            moment(5, e.RequestAdmitted),
            moment(70, e.StepRan, 0, took_ns=MS),
            moment(90, e.StepRan, 0, engine="other"),
        ]
    )
    (life,) = _only(timeline, LIFE)
    assert (life.end_ns, life.is_open) == (70 * MS, True)
    assert _phases(timeline) == [("waiting", 0, 5), ("running", 5, 70)]
    assert [s.is_open for s in timeline.spans if s.kind in PHASES] == [False, True]


def test_reused_id_is_another_request() -> None:
    """Each use of a request id is a `LIFE` span of its own, even if the trace lacks the end of the earlier use."""
    for ended in (True, False):
        some = [
            moment(0, e.RequestAdded),
            moment(5, e.RequestAdmitted),
            moment(30, e.RequestAdded),
            moment(50, e.RequestDone),
        ]
        lives = _only(spans([*some, *([moment(20, e.RequestDone)] if ended else [])]), LIFE)
        assert sorted((s.begin_ns // MS, s.end_ns // MS) for s in lives) == [(0, 20 if ended else 30), (30, 50)]
        assert [s.is_open for s in sorted(lives)] == [not ended, False]


def test_late_news_does_not_revive_a_request() -> None:
    """A release of leases after a request's end adds no span, and neither does a fault of an unknown request."""
    timeline = spans(
        [
            moment(0, e.RequestAdded),
            moment(20, e.RequestDone),
            moment(30, e.LeasesReturned),
            moment(35, e.SavePlanned),
            moment(40, e.Fault, name="f"),
            moment(41, e.Fault, name="f", request="unknown"),
        ]
    )
    assert [span.end_ns for span in _only(timeline, LIFE)] == [20 * MS]
    assert [timeline.lanes[s.lane].name for s in _only(timeline, "fault_mark")] == ["marks", "marks"]


def test_copies_name_their_requests() -> None:
    """A copy names the requests of its jobs in the same engine. A failed copy is a span of another kind."""
    timeline = spans(
        [
            moment(0, e.SavePlanned, job=1, request="a"),
            moment(0, e.SavePlanned, job=1, request="z", engine="other"),
            moment(0, transitions.LayerLanded, 0, request="b", machine="save", cursor=2),
            moment(1, e.LayerCopied, 0, request="", kind="save", layer=3, jobs=[1, 2, 9], took_ns=MS),
            moment(2, e.LayerCopied, 0, request="c", kind="load_sync", layer=0, jobs=[4], took_ns=MS, failed=[4]),
        ]
    )
    (copy,) = _only(timeline, "save")
    assert (copy.name, copy.requests, copy.end_ns - copy.begin_ns) == ("layer 3", ("a", "b"), MS)
    (failed,) = _only(timeline, "copy_failed")
    assert (timeline.lanes[failed.lane].name, failed.requests) == ("loads", ("c",))


def test_evictions_of_a_step_are_one_mark() -> None:
    """The mark has the number of evictions."""
    timeline = spans([moment(i, transitions.Evicted, step=i // 3, machine="chunk", cursor=i) for i in range(5)])
    assert [(s.name, s.begin_ns) for s in timeline.spans] == [("evicted: 3", 0), ("evicted: 2", 3 * MS)]


def test_the_order_of_the_events_does_not_matter() -> None:
    """The files of several processes are read one after another, so events may come in any order."""
    some = play(25)
    shuffled = list({(event.t_ns, type(event), event.rank, i): event for i, event in enumerate(some)}.values())
    random.Random(1).shuffle(shuffled)
    shuffled.sort(key=lambda event: event.rank)  # the files of the ranks are read one after another
    first = some[:]
    first.sort(key=lambda event: event.t_ns)
    assert _content(spans(first)) == _content(spans(sorted(shuffled, key=lambda event: -event.t_ns)))


def _content(timeline: Timeline) -> list[object]:
    lives = sorted((s.name, s.begin_ns, s.end_ns, s.is_open) for s in timeline.spans if s.kind == LIFE)
    others = sorted((s.kind, s.begin_ns, s.end_ns, s.requests) for s in timeline.spans if s.layer == 0)
    return [timeline.lanes, lives, others, timeline.duration_ns]


def test_spans_of_a_row_do_not_overlap() -> None:
    """The scheduler's lanes are above the lanes of the engine's ranks.

    Spans in a row do not overlap, and rows are used again.
    """
    timeline = spans(play(40, ranks=2, engine="b") + play(10, ranks=1, engine="a"))
    sides = [(lane.engine, lane.rank, lane.name) for lane in timeline.lanes]
    assert [side for side in sides if side[2] in {REQUESTS, "forward"}] == [
        ("a", -1, "requests"), ("a", 0, "forward"), ("b", -1, "requests"), ("b", 0, "forward"), ("b", 1, "forward"),
    ]  # fmt: skip
    ends: dict[tuple[int, int, int], int] = defaultdict(int)
    for span in timeline.spans:  # spans are sorted by lane, row, layer and time
        here = (span.lane, span.row, span.layer)
        assert 0 <= span.row < timeline.lanes[span.lane].rows
        assert span.layer == 2 or span.begin_ns >= ends[here]
        assert span.end_ns >= span.begin_ns
        ends[here] = max(ends[here], span.end_ns)
    lives = [span for span in timeline.spans if span.kind == LIFE and timeline.lanes[span.lane].engine == "b"]
    at_once = max(sum(s.begin_ns <= one.begin_ns < s.end_ns for s in lives) for one in lives)
    assert len(lives) == 40
    assert {timeline.lanes[s.lane].rows for s in lives} == {at_once}


def test_phases_fill_the_life_span_of_their_request() -> None:
    """Phases follow each other without gaps. Marks are in the row of their request."""
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
    """Clocks of several hosts are aligned by the wall clock, but only if their monotonic clocks differ by much."""
    here = moment(5000, e.StepRan, 0, step=1)
    there = e.StepRan(77, 1, "", 0, 1, here.wall_ns + 3 * MS, "e", took_ns=MS)
    near = e.StepRan(here.t_ns + 4 * MS, 2, "", 0, 1, here.wall_ns + 6 * MS, "e", took_ns=MS)
    timeline = spans([here, there, near])
    assert [(timeline.lanes[s.lane].rank, s.begin_ns) for s in timeline.spans] == [(0, 0), (1, 3 * MS), (2, 4 * MS)]
    assert (timeline.origin_ns, timeline.wall_ns) == (here.t_ns, here.wall_ns)


def _odd_events() -> list[Event]:
    """Return every kind of event with absurd values."""
    odd: dict[type, list[Any]] = {
        int: [0, -1, 1 << 62, -(1 << 70), 1 << 80],
        float: [0.0, -1.0, float("nan"), float("inf"), 1e308],
        str: ["", "\x00\ud800", HOSTILE[0]],
        bool: [True, False],
    }
    rng, made = random.Random(3), list[Event]()
    for kind in transitions.EVENTS.values():
        for _ in range(40):
            fields = {
                field.name: rng.choice(odd.get(field.type, [msgspec.NODEFAULT]))
                for field in msgspec.structs.fields(kind)
            }
            made.append(kind(**{name: value for name, value in fields.items() if value is not msgspec.NODEFAULT}))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_odd_data_raise_nothing(seed: int, tmp_path: Path) -> None:
    """Absurd values, parts of a trace and an empty trace raise no error. The resulting JSON is valid."""
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
    """The page has the columns of the spans and all fields of the events.

    Numbers that JavaScript would round are text.
    """
    events = [*play(10), moment(ORIGIN_NS / MS, e.CacheReset, chunks=(1 << 53) + 1)]
    timeline = write_html(events, tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    assert sum(track[3] for track in data["tracks"]) == len(timeline.spans) == len(data["spans"]["begin"])
    assert [data["strings"][i] for i in data["spans"]["name"]] == [span.name for span in timeline.spans]
    tables = {table["tag"]: table for table in data["shown"]}
    assert tables["cache_reset"]["fields"]["chunks"] == ["one", str((1 << 53) + 1)]
    assert set(tables["layer_copied"]["fields"]) == set(e.LayerCopied.__struct_fields__)
    copies = [event for event in timeline.events if isinstance(event, e.LayerCopied)]
    assert tables["layer_copied"]["fields"]["took_ns"] == ["each", [event.took_ns for event in copies]]


def test_data_cannot_add_tags_or_scripts(tmp_path: Path) -> None:
    """The data contain no tags, and the page's security policy allows only the template's script."""
    page = tmp_path / "page.html"
    write_html([moment(i, e.RequestAdded, request=name, traceparent=name) for i, name in enumerate(HOSTILE)], page)
    data = _embedded(page)
    assert set(HOSTILE) <= set(data["strings"])
    text = page.read_text(encoding="utf-8")
    inside = text[text.index('id="trace">') + len('id="trace">') : text.rindex("<script>")]
    assert inside.count("<") == 1  # this is the "<" of </script>
    assert inside.isascii()
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=\"?(?!data:)\w", text.replace(inside, ""))


def test_perfetto_file_has_names_nested_spans_and_both_ends(tmp_path: Path) -> None:
    """Processes and threads have names. Spans of a thread are nested, requests have both ends, and times are in us."""
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


def test_the_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """When the limit of drawn events is reached, the data of further jobs, requests and engines are not kept."""

    def peak(requests: int) -> int:
        file = tmp_path / str(requests)
        file.write_bytes(b"\n".join(map(msgspec.json.encode, play(requests))))
        trace = Trace(file)
        tracemalloc.start()
        try:
            timeline = spans(trace, 300)
            assert bool(timeline.left_out) == (requests > 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1) > 0  # this first run also makes data that are made only once
    assert peak(400) < 1.3 * peak(100)
