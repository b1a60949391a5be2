"""`kvpipe trace show` prints a trace in the terminal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvpipe.cli.main import main
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.show import Overview

MS = 1_000_000


def _request(
    name: str, lived_ms: float, at: int = 0, *, hit: int = 0, why: str = "not_saved", again: int = 0
) -> list[e.Event]:
    common = (at, -1, name, 1, 1, 1_000_000_000 + at, "e")
    hits = {"memory": hit} if hit else {}
    reported: list[e.Event] = [e.RequestAdded(*common, prompt_tokens=100)]
    reported += [
        (e.RequestReadmitted if i else e.RequestAdmitted)(
            *common, prompt_tokens=100, hit_tokens=hits, missed_tokens=100 - hit, why=why, waited_ms=2.0
        )
        for i in range(1 + again)
    ]
    end = at + int(lived_ms * MS)
    done = e.RequestDone(
        end, -1, name, 1, 9, 1_000_000_000 + end, "e", status="finished_stopped", prompt_tokens=100, output_tokens=7,
        preemptions=again, lived_ms=lived_ms,
    )  # fmt: skip
    return [*reported, done]


def _write(path: Path, events: list[e.Event]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


def test_overview_has_slowest_requests_misses_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The overview has the slowest requests, misses with their reasons, faults, and the number of dropped events."""
    events: list[e.Event] = [e.Started(0, -1, "", 0, 0, 1_000_000_000, "e")]
    for i in range(30):
        events += _request(f"quick-{i}", 10 + i, i * MS, hit=60, why="below_minimum")
    events += _request("the-slow-one", 5000, again=2, why="evicted")
    events += [e.Fault(1, 0, "r", 0, 0, 1, "e", name="job_failed", seen=1), e.Stuck(1, 0, "r", 0, 0, 1, "e", job=4)]
    events += [e.Dropped(1, 0, "", 0, 0, 1, "e", count=12)]
    path = _write(tmp_path / "t", events)
    with path.open("a", encoding="utf-8") as file:
        file.write("somebody else's line\n")
    assert main(["trace", "show", str(path), "--slowest", "3"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert "31 requests over" in out
    assert "3300 tokens were asked for: 55% from memory, 45% computed.\n" in out
    slow = next(i for i, row in enumerate(rows) if row and row[-1] == "the-slow-one")
    assert rows[slow][:2] == ["5000", "2"]
    assert rows[slow][5] == "2"
    assert rows[slow + 1][-1] == "quick-29"
    assert "quick-26" not in out
    assert ["evicted", "3", "300"] in [row[:3] for row in rows]
    assert "the chunk was evicted to make room" in out
    assert ["job_failed", "1"] in rows
    assert ["stuck", "1"] in rows
    assert "12 events were dropped" in out
    assert "1 not a line of a trace" in out


def test_memory_is_bounded_by_the_requests_that_live() -> None:
    """A finished request takes no memory, unless it is slow enough for a row in the table."""
    found = Overview(slowest=5)
    for i in range(1000):
        for event in _request(f"r{i}", i % 100):
            found.feed(event)
    assert not found._admitted
    assert [row.lived_ms for row in found.slowest] == [99.0] * 5
    assert found.done == 1000


def test_one_request_as_a_waterfall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job has one line for all layers and ranks.

    Other requests are left out. Times count from the request's arrival.
    """
    events = _request("req-1-abcdef", 40, 100 * MS) + _request("req-10", 40)
    plan = e.SavePlanned(110 * MS, -1, "req-1-abcdef", 1, 1, 0, "e", job=7, pages=5)
    events.append(plan)
    for rank in (0, 1):
        was = "PENDING"
        for k in range(3):
            now = f"LAYER_{k}" if k < 2 else "LANDED"
            at = (112 + k) * MS
            events.append(
                transitions.LayerLanded(at, rank, "req-1-abcdef", 1, 1, 0, "e", "save", 7, "landed_next", was, now)
            )
            was = now
    ends = (120 * MS, 0, "req-1-abcdef", 1, 1, 0, "e", "save", 7, "confirm", "LANDED", "FINALIZED")
    events.append(transitions.Finalized(*ends))
    events.append(
        transitions.Failed(121 * MS, 1, "req-1-abcdef", 1, 1, 0, "e", "save", 7, "fault", "LANDED", "FAILED", "a [b] c")
    )
    path = _write(tmp_path / "t", events)
    assert main(["trace", "show", str(path), "--request", "req-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("request req-1-abcdef, 40.0 ms")
    assert [line.split()[3] for line in lines[1:]] == ["request_added", "request_admitted", "save", "request_done"]
    save = lines[3]
    assert save.split()[:2] == ["10.00", "ms"]
    assert "job 7: 5 blocks, 3 layers on 2 ranks, FAILED a [b] c, FINALIZED" in save
    assert save.index("━") == 14 + 10  # the bar has forty columns, of which this is a quarter
    assert save.count("━") == 11
    assert main(["trace", "show", str(path), "--request", "req-1", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 + 1 + 6 + 2


def test_unknown_request_is_reported_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message for an unknown request names the command that lists requests."""
    path = _write(tmp_path / "t", _request("r1", 1))
    assert main(["trace", "show", str(path), "--request", "r2"]) == 1
    assert "has no event of request r2; " in capsys.readouterr().out


def test_control_characters_of_a_request_id_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters and markup in a request id are printed as text."""
    name = 'a[/x]\x1b[31m"b'
    path = _write(tmp_path / "t", _request(name, 1))
    assert main(["trace", "show", str(path)]) == 0
    assert main(["trace", "show", str(path), "--request", name]) == 0
    assert main(["trace", "show", str(path), "--request", "nope[/x]\x1b"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count('a[/x]\\x1b[31m"b') == 2


def test_number_of_a_fault_includes_faults_without_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed number is the sum of all sides' faults. Only the first and every thousandth fault have an event."""
    seen = [(0, 1), (0, 1001), (1, 1)]
    path = _write(tmp_path / "t", [e.Fault(1, rank, "", 0, 0, 1, "e", name="odd", seen=times) for rank, times in seen])
    assert main(["trace", "show", str(path)]) == 0
    assert ["odd", "1002"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_copies_are_shown_under_each_of_their_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --all, a copy for several requests is shown under each request, with this request's jobs."""
    events = _request("r1", 40)
    events.append(e.SavePlanned(1, -1, "r1", 1, 1, 0, "e", job=7, pages=5))
    events += [e.LayerCopied(2, 0, "", 0, 1, 0, "e", kind="save", layer=3, jobs=jobs) for jobs in ([6, 7], [8])]
    path = _write(tmp_path / "t", events)
    assert main(["trace", "show", str(path), "--request", "r1", "--all"]) == 0
    assert capsys.readouterr().out.count("layer_copied") == 1


def test_empty_trace_is_reported_with_possible_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message for an empty trace names possible causes."""
    assert main(["trace", "show", str(_write(tmp_path / "t", []))]) == 0
    assert "The trace is empty" in capsys.readouterr().out
