"""Hostile or damaged traces do no harm to the terminal, the browser or the memory of the person who reads them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpipe.cli.main import main
from kvpipe.errors import TransferError
from kvpipe.trace import events as e
from kvpipe.trace import timeline, transitions
from kvpipe.trace.log import ID_CHARS_MAX, bounded
from kvpipe.trace.perfetto import write_perfetto
from kvpipe.trace.reader import LINE_BYTES_MAX, Trace
from kvpipe.trace.recorder import FileSink, Recorder, Writer
from kvpipe.trace.timeline_html import write_html
from tests.rigs.synthetic_trace import play

NASTY = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\x9b31m\r\n\u202egnp"
HUGE = 10**400
COMMANDS = ("show", "show --request r --all", "replay", "timeline -o out.html", "timeline -o out.json --perfetto")


def _run(command: str, trace: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(trace.parent)
    name, *rest = command.split()
    return main(["trace", name, str(trace), *rest])


def _filled(kind: type[e.Event], fill: Callable[[str, Any], Any]) -> bytes:
    """Return a line of the event `kind`. `fill` gives the values of the line's fields."""
    message = {field.encode_name: fill(field.encode_name, field.type) for field in msgspec.structs.fields(kind)}
    return msgspec.json.encode({"event": kind.__struct_config__.tag} | message)


def _texts(name: str, kind: Any) -> Any:
    if kind is str:
        return "r" if name == "request" else NASTY
    if kind in {int, float, bool}:
        return kind(1)
    return {NASTY: NASTY} if "str, str" in str(kind) else {NASTY: 3} if "dict" in str(kind) else []


def _write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_in_a_trace_commands_the_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters and rich's markup in ids and text fields are printed, and have no effect."""
    lines = [_filled(kind, _texts) for kind in transitions.EVENTS.values()]
    lines += [
        _filled(kind, lambda n, k: NASTY if n == "request" else _texts(n, k)) for kind in transitions.EVENTS.values()
    ]
    _run(command, _write(tmp_path / "trace.jsonl", lines), monkeypatch)
    message = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in message.out + message.err)
    assert command != "show" or "[bold red]x[/]" in message.out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "number", [HUGE, -HUGE, 2**63, -(2**63), 2**53 + 1, 0, -1], ids=lambda n: f"{len(str(n))}-{n % 97}"
)
def test_numbers_may_be_nonsense(command: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absurd numbers in any field of one line do not prevent reading the other lines."""
    rng = random.Random(str(number))
    good = [msgspec.json.encode(event) for event in play(3)]

    def one(name: str, kind: Any) -> Any:
        if kind in {int, float} and rng.random() < 0.5:
            return number
        return {"memory": number} if "str, int" in str(kind) else _texts(name, kind)

    lines = good + [_filled(kind, one) for kind in transitions.EVENTS.values() for _ in range(4)]
    rng.shuffle(lines)
    assert _run(command, _write(tmp_path / "trace.jsonl", lines), monkeypatch) in {0, 1}


@pytest.mark.parametrize("command", COMMANDS)
def test_deeply_nested_line_is_unreadable(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line with extremely deep nesting is counted as unreadable."""
    deep = b"[" * (LINE_BYTES_MAX // 2)
    lines = [b'{"event":"started","t_ns":1,"x":' + deep, b'{"event":"fault","fields":' + deep, deep, b'{"a":' * 9999]
    assert _run(command, _write(tmp_path / "trace.jsonl", lines), monkeypatch) in {0, 1}
    assert "request r" in capsys.readouterr().out or "--request" not in command
    trace = Trace(tmp_path / "trace.jsonl")
    assert not list(trace)
    assert trace.unread.total() == len(lines)


@pytest.mark.parametrize("layers", [1 << 40, 4097, -1])
def test_an_engine_of_very_many_layers(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line with too many layers is counted as unreadable, because a replay makes one state per layer."""
    started = e.Started(1, 0, "", 0, 0, engine="x", layers=layers)
    moved = transitions.Finalized(
        2, 0, "r", 0, 1, engine="x", machine="save", cursor=1, was="PENDING", now="FAILED", on="fault"
    )
    lines = [msgspec.json.encode(started), msgspec.json.encode(moved)]
    assert _run("replay", _write(tmp_path / "trace.jsonl", lines), monkeypatch) == 1
    assert "1 of 2 lines could not be read: 1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["itself", "its older part", "through a link"])
@pytest.mark.parametrize("more", ["", " --perfetto"])
def test_a_timeline_does_not_overwrite_its_trace(
    how: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timeline's output file is refused if it is the trace, the trace's older part, or a link to the trace."""
    lines = [msgspec.json.encode(event) for event in play(2)]
    trace = _write(tmp_path / "trace.jsonl", lines)
    older = _write(tmp_path / "trace.jsonl.1", lines)
    (tmp_path / "link").symlink_to(trace)
    out = {"itself": "trace.jsonl", "its older part": "trace.jsonl.1", "through a link": "link"}[how]
    assert _run(f"timeline -o {out}{more}", trace, monkeypatch) == 2
    assert "is the trace itself; name another file" in capsys.readouterr().err
    assert trace.read_bytes() == older.read_bytes() == b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("write", [write_html, write_perfetto])
def test_a_page_that_is_not_finished_is_not_there(write: Callable[..., Any], tmp_path: Path) -> None:
    """Writing a timeline fails: an earlier file does not change, and no temporary file is left."""
    page = tmp_path / "out"
    page.write_text("before", encoding="utf-8")

    def events() -> Iterator[e.Event]:
        yield from play(2)
        raise TransferError("the disk is gone")

    with pytest.raises(TransferError):
        write(events(), page)
    assert page.read_text(encoding="utf-8") == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_timeline_keeps_what_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timeline keeps only the events that it draws, and no more events than a page can show."""
    events = list(play(20))
    made = timeline.spans(events)
    assert made.total == len(events)
    assert not made.left_out
    assert len(made.events) < len(events) / 2
    monkeypatch.setattr(timeline, "EVENTS_MAX", 10)
    monkeypatch.setattr(timeline.spans, "__defaults__", (10,))
    assert len(timeline.spans(events).events) == 10
    path = _write(tmp_path / "trace.jsonl", [msgspec.json.encode(event) for event in events])
    assert _run("timeline -o out.html", path, monkeypatch) == 0
    assert f"{len(made.events) - 10} events are not drawn: a page has room for the first 10" in capsys.readouterr().out


def test_an_id_of_a_million_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace shortens a long id.

    The short form differs from that of similar ids, and a search for the whole id finds it.
    """
    ids = [f"{'x' * 1_000_000}{number}" for number in range(2)]
    assert len({bounded(one) for one in ids}) == 2
    assert bounded("y" * ID_CHARS_MAX) == "y" * ID_CHARS_MAX
    recorder = Recorder(lifecycle=True)
    path = tmp_path / "trace.jsonl"
    writer = Writer(recorder, [FileSink(path, 1 << 20, e.Started(0, -1, "", 0, 0))], "engine")
    for one in ids:
        for _ in range(50):
            recorder.put(e.RequestAdded(*recorder.of(one, 0)))
        recorder.fault("bad", 1, {"request": one, "error": one})
    writer.close()
    assert path.stat().st_size < 60_000
    assert _run(f"show --request {ids[0]}", path, monkeypatch) == 0
    assert capsys.readouterr().out.count("request_added") == 50
