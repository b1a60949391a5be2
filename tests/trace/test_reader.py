"""Tests of reading and replaying traces: unreadable lines are counted, and wrong or missing transitions are found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpipe.cli.main import main
from kvpipe.errors import UsageError
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.reader import CUT, FOREIGN, MALFORMED, NEWER, Trace
from kvpipe.trace.replay import Replay, replay

Events = list[e.Event]


def _moves(machine: str, cursor: int, *ons: str, layers: int = 3, rank: int = 0) -> Events:
    """Return the events that a cursor records when the events `ons` are fired one after another."""
    compiled = transitions.MACHINES[machine].compile(layers if transitions.MACHINES[machine].layered else 0)
    at, reported = compiled.initial, list[e.Event]()
    for on in ons:
        edge = at.on[on]
        kind = transitions.KINDS[machine, at.row, edge.to.row] if edge.moves else transitions.NoOp
        reported.append(
            kind(len(reported), rank, "r", 1, 1, 0, "e", machine, cursor, on, at.name, edge.to.name, edge.why)
        )
        at = edge.to
    return reported


def _started(rank: int = 0, *, part: int = 0) -> e.Started:
    return e.Started(0, rank, "", 0, 0, 0, "e", layers=3, part=part)


def _ended(rank: int = 0) -> e.Ended:
    return e.Ended(9, rank, "", 0, 0, 0, "e")


SAVED = ("landed_next", "landed_next", "landed_next", "landed_again", "confirm")


def _whole() -> Events:
    """Return a short trace without problems."""
    chunk = _moves("chunk", 4, "reserve", "landed_last", "evict_idle", "reserve", "landed_last", rank=-1)
    loads = "admit_load", "dispatch", "finish", "loaded"
    request = _moves("request", 1, "ask", "admit_empty", "preempt", *loads, rank=-1)
    return [_started(), _started(-1), *_moves("save", 1, *SAVED), *chunk, *request, _ended(), _ended(-1)]


def _write(path: Path, events: Sequence[e.Event]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


# ---- reading --------------------------------------------------------------------------------------------------------


def test_readable_lines_are_read_and_others_are_counted(tmp_path: Path) -> None:
    """Unreadable lines are counted by kind: of other programs, damaged, of a newer version, and torn at the end."""
    events = _whole()
    path = _write(tmp_path / "t", events)
    lines = path.read_bytes().splitlines()
    newer = lines[3].replace(b'"event":"layer_landed"', b'"event":"warped"')
    strange = lines[3].replace(b'"rank":0', b'"rank":"first"')
    damaged = b'{"event":"layer_landed","t_ns":' + b"\xff}"
    foreign = b"INFO 11-21 09:00:00 [core.py:58] starting"
    tomorrows = lines[3].replace(b'"rank":0', b'"rank":0,"colour":"red"')
    mixed = [
        tomorrows,
        lines[0],
        foreign,
        *lines[1:4],
        newer,
        strange,
        b"",
        damaged,
        b'{"time": 1}',
        *lines[4:],
        lines[3][:40],
    ]
    path.write_bytes(b"\n".join(mixed))
    trace = Trace(path)
    assert list(trace) == events
    assert trace.unread == {FOREIGN: 2, NEWER: 2, MALFORMED: 2, CUT: 1}
    assert trace.unread_summary().startswith(f"7 of {len(mixed)} lines could not be read: 2 ")


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    """A trace of a newer format is read as far as possible."""
    trace = Trace(_write(tmp_path / "t", [e.Started(0, 0, "", 0, 0, format=e.FORMAT + 1)]))
    assert len(list(trace)) == 1
    assert trace.unread == {NEWER: 1}


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    """A line without an end is read in parts, so it takes bounded memory."""
    path = tmp_path / "t"
    path.write_bytes(b"x" * (5 << 20) + b"\n" + msgspec.json.encode(_started()) + b"\n")
    trace = Trace(path)
    assert list(trace) == [_started()]
    assert trace.unread[FOREIGN] >= 5


@given(st.binary(max_size=400), st.integers(0, 2000), st.integers(0, 100))
@settings(deadline=None, max_examples=150)
def test_nothing_in_a_file_raises(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int, cut: int) -> None:
    """For any bytes at any offset of the file, `replay` and `show` do not raise."""
    path = _write(tmp_path_factory.mktemp("junk") / "t", _whole())
    data = path.read_bytes()
    path.write_bytes((data[:at] + junk + data[at + cut :])[: len(data)])
    replay(Trace(path))
    for command in ("replay", "show"):
        assert main(["trace", command, str(path)]) in {0, 1}
    assert main(["trace", "show", str(path), "--request", "r", "--all"]) in {0, 1}


@pytest.mark.parametrize("command", ["show", "replay"])
def test_missing_file_gives_one_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file gives status 2 and one sentence."""
    with pytest.raises(UsageError):
        Trace(tmp_path)
    assert main(["trace", command, str(tmp_path / "none")]) == 2
    assert "cannot be read (No such file or directory); give a trace_file" in capsys.readouterr().err


COMMANDS = ("show", "show --request r", "replay", "timeline -o out.html")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["a device", "a pipe", "a folder"])
def test_device_and_pipe_are_refused(
    what: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading a device or a pipe might never end, so it is refused with its name and type."""
    monkeypatch.chdir(tmp_path)
    Path("a folder").mkdir()
    os.mkfifo("a pipe")
    Path("a device").symlink_to("/dev/zero")
    name, *rest = command.split()
    assert main(["trace", name, what, *rest]) == 2
    assert capsys.readouterr().err == f"kvpipe: {what} cannot be read (it is {what}); give a trace_file\n"
    assert not Path("out.html").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_without_an_end_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of terabytes, such as a disk's image, is not read to its end."""
    monkeypatch.chdir(tmp_path)
    _write(Path("image"), _whole())
    os.truncate("image", 1 << 40)  # the file is sparse, so it takes no room on the disk
    name, *rest = command.split()
    assert main(["trace", name, "image", *rest]) == 2
    assert capsys.readouterr().err == "kvpipe: image has a line of more than 64 MiB; give a trace_file\n"


# ---- replaying ------------------------------------------------------------------------------------------------------


def test_whole_trace_replays_without_a_problem() -> None:
    """A replay checks every cursor of every machine, and also events that cause no move.

    After a slot was freed, its cursor begins in the initial state again.
    """
    done = replay(_whole())
    assert done.problems == []
    assert (done.transitions, done.no_ops, done.cursors) == (15, 2, 3)


def _without(number: int) -> Callable[[Events], Events]:
    return lambda events: events[:number] + events[number + 1 :]


def _changed(number: int, **fields: object) -> Callable[[Events], Events]:
    return lambda events: [
        msgspec.structs.replace(one, **fields) if i == number else one for i, one in enumerate(events)
    ]


def _swapped(number: int) -> Callable[[Events], Events]:
    return lambda events: [*events[:number], events[number + 1], events[number], *events[number + 2 :]]


@pytest.mark.parametrize(
    ("spoil", "stated"),
    [
        (_without(3), "save 1 (rank 0 of e): landed_next in LAYER_1, but it was in LAYER_0: a transition is missing"),
        (_without(2), "it was in PENDING: a transition is missing"),
        (_without(6), "save 1 (rank 0 of e) was left in LANDED"),
        (_without(0), "no line has the number of its engine's layers"),
        (_swapped(3), "a transition is missing"),
        (_changed(3, now="LANDED"), "landed_next leads from LAYER_0 to LAYER_1, not to LANDED"),
        (_changed(3, on="landed_thrice"), "'landed_thrice' is no event of the machine"),
        (_changed(3, on="landed_again", now="LAYER_0"), "is recorded as a move"),
        (_changed(4, on="unknown", machine="toaster"), "there is no such machine"),
        (_changed(6, on="deny"), "deny is illegal in LANDED: every layer has landed"),
        (_changed(8, was="RESERVED", on="lease"), "lease is illegal in RESERVED"),
        (_changed(13, on="admit_load", now="ALLOCATED"), "admit_empty"),
    ],
)
def test_spoiled_trace_gives_a_problem(spoil: Callable[[Events], Events], stated: str) -> None:
    """Each change makes the trace wrong. The replay finds a problem, which names the cursor and the reason."""
    done = replay(spoil(_whole()))
    assert not done.ok
    if stated != "admit_empty":
        assert any(stated in problem for problem in done.problems), done.problems


def test_an_illegal_transition_is_a_problem() -> None:
    """An illegal transition is a problem, although it was contained and has not moved the cursor."""
    event = transitions.Illegal(1, -1, "r", 1, 1, 0, "e", "request", 1, "dispatch", "NEW", "NEW", "the table says why")
    (problem,) = replay([_started(-1), event]).problems
    assert (
        "request 1 (scheduler of e): dispatch is illegal in NEW: this admission has no load, or its load has ended"
        in problem
    )


def test_replay_begins_at_the_first_event_after_a_gap() -> None:
    """The first events are missing, or events were dropped. The replay begins with the next events."""
    saved = _moves("save", 1, *SAVED)
    assert replay([_started(part=1), *saved[2:]]).ok
    assert not replay([_started(part=1), *saved[1:2], *saved[3:]]).ok
    gap = e.Dropped(0, 0, "", 0, 0, 0, "e", count=7)
    done = replay([_started(), *saved[:1], gap, *saved[2:], _ended()])
    assert done.ok
    assert done.dropped == 7
    assert not replay([_started(), *saved[:1], *saved[2:]]).ok


def test_restarted_engine_has_new_cursors() -> None:
    """A restarted engine has new cursors, although it has the same name and its jobs have the same numbers."""
    whole = _whole()
    assert replay([*whole, *whole]).problems == []
    crashed = [one for one in whole if not isinstance(one, e.Ended)][:4]
    assert replay([*whole, *crashed]).problems == [], "the first one's end says nothing of the second"


def test_requests_and_jobs_without_an_end_are_named() -> None:
    """Requests and jobs that have not ended are named. Chunks need not end."""
    done = replay([_started(), *_moves("save", 1, *SAVED[:2]), *_moves("chunk", 4, "reserve", "landed_last")])
    assert done.unfinished() == ["save 1 (rank 0 of e) is in LAYER_1"]


def test_problems_are_bounded() -> None:
    """Up to a limit, problems are listed. Further problems are only counted."""
    done = Replay()
    for i in range(3000):
        done.feed(transitions.NoOp(0, 0, "", 0, 0, 0, "e", "toaster", i, "on", "OFF", "OFF", "why"))
    assert (len(done.problems), done.more_problems) == (1000, 2000)


def test_command_exits_with_1_if_the_replay_has_found_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the replay finds a problem, the command's status is 1."""
    path = _write(tmp_path / "t", _whole())
    assert main(["trace", "replay", str(path)]) == 0
    assert (
        capsys.readouterr().out
        == "15 transitions and 2 no-ops of 3 cursors: every transition is legal, none is missing\n"
    )
    _write(path, _without(3)(_whole()))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "warped", "t_ns": 1}) + "\n")
    assert main(["trace", "replay", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "1 of" in lines[0]
    assert NEWER in lines[0]
    assert lines[1].startswith("PROBLEM save 1")
    assert lines[-1].endswith("NOT a proof")


def test_both_parts_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace's older file `FILE.1` is read first."""
    whole = _whole()
    _write(tmp_path / "t.1", whole[:4])
    _write(tmp_path / "t", whole[4:])
    assert main(["trace", "replay", str(tmp_path / "t")]) == 0
    assert capsys.readouterr().out.startswith("15 transitions and 2 no-ops")
