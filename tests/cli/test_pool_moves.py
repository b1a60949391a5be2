"""`kvpipe pool moves` prints the latest moves of slots from the journal of a node's memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli.main import main
from kvpipe.node.client import NodePool
from kvpipe.node.layout import SlotRecord
from kvpipe.node.ledger import Ledger
from kvpipe.node.processes import checked_folder, holder_of, memory_of_holder
from kvpipe.node.segment import Segment, create
from kvpipe.node.slot_moves import SlotMoves, moves_of
from kvpipe.statemachine import node_slot as m
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs.node_engine import SLOT_BYTES, options

KEY = b"k" * 32


@pytest.fixture
def folder(short_path: Path) -> Iterator[Path]:
    """Return the folder of a holder. An engine has saved a chunk in the holder's memory."""
    pool = NodePool(options(short_path))

    def done(what: str) -> bool:
        pool.poll()
        return bool(pool.stock.free if what == "granted" else not pool.stock.reports)

    assert eventually(lambda: done("granted"))
    slot = pool.stock.take()
    assert slot is not None
    assert pool.stock.landed(slot, 0, KEY, 4)
    assert eventually(lambda: done("published"))
    yield short_path
    pool.close()


def _moves(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_moves_of_a_slot_show_the_life_of_its_chunk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each move is a legal move of the machine node_slot. `--slot` leaves out the moves of other slots."""
    assert main(["pool", "moves", "--dir", str(folder)]) == 0
    moves = _moves(capsys.readouterr().out)
    assert [move["seq"] for move in moves] == list(range(1, len(moves) + 1))
    assert {(move["was"], move["now"]) for move in moves} >= {("", m.GRANTED), (m.GRANTED, m.PUBLISHED)}
    (published,) = [move for move in moves if move["now"] == m.PUBLISHED]
    assert (published["key"], published["units"], published["region"]) == (KEY.hex(), 4, 0)
    assert main(["pool", "moves", "--dir", str(folder), "--slot", str(published["slot"])]) == 0
    assert _moves(capsys.readouterr().out) == [move for move in moves if move["slot"] == published["slot"]]


@contextmanager
def _following(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command with `--follow`, whose first move was read already. Its errors are empty at the end."""
    command = [sys.executable, "-m", "kvpipe", "pool", "moves", "--follow", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["seq"] == 1
            yield process
            assert process.wait(WAIT_S) == 0
            assert process.stderr is not None
            assert not process.stderr.read()
        finally:
            process.kill()


def _attached(folder: Path, slot_bytes: int) -> NodePool:
    pool = NodePool(options(folder, slot_bytes=slot_bytes))
    assert eventually(lambda: (pool.poll(), pool.stock.free)[-1])  # type: ignore[func-returns-value]
    return pool


def test_follow_prints_later_moves_until_the_holder_ends(folder: Path) -> None:
    """Later moves include those of slots of a new size."""
    with _following(folder) as process:
        pool = _attached(folder, 2 * SLOT_BYTES)
        assert process.stdout is not None
        assert any(json.loads(line)["region"] == 1 for line in process.stdout)
        pool.close()
        os.kill(holder_of(folder), signal.SIGKILL)


def test_follow_ends_without_a_traceback(folder: Path) -> None:
    """The user presses Ctrl-C, or the program that reads the moves has ended."""
    with _following(folder) as process:
        process.send_signal(signal.SIGINT)
    with _following(folder) as process:
        assert process.stdout is not None
        process.stdout.close()
        pool = _attached(folder, SLOT_BYTES)
        assert process.wait(WAIT_S) == 0
        pool.close()


def test_moves_that_the_journal_has_lost_are_left_out() -> None:
    """The journal is a ring. The reader continues with the oldest move that is still there."""
    fd = create(2, 64, rows=1, ring=8)
    ledger = Ledger(Segment(fd, whole=False))
    ledger.recover()
    moves = SlotMoves(Segment(fd, whole=False))
    for generation in range(20):
        ledger.commit(SlotRecord(0, generation % 2, m.GRANTED if generation % 4 < 2 else m.FREE, generation))
    assert [move.seq for move in moves.read()] == list(range(13, 21))
    assert list(moves.read()) == []
    ledger.commit(SlotRecord(0, 0, m.GRANTED, 20))
    assert [(move.seq, move.was, move.now) for move in moves.read()] == [(21, m.FREE, m.GRANTED)]
    for generation in range(21, 30):
        ledger.commit(SlotRecord(0, 1, m.GRANTED if generation % 2 else m.FREE, generation))
    ledger.commit(SlotRecord(0, 0, m.GRANTED, 30))
    assert [move.was for move in moves.read() if move.slot == 0] == [""]
    os.close(fd)


def test_memory_is_searched_again_when_the_search_was_not_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder may close a descriptor during the search, for example when an engine leaves."""
    missed = [None, None]
    monkeypatch.setattr(
        "kvpipe.node.slot_moves.memory_of_holder", lambda of: missed.pop() if missed else memory_of_holder(of)
    )
    with moves_of(folder) as moves:
        assert [move.seq for move in moves.read()][:1] == [1]


def test_moves_without_a_holder_are_an_error(short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the folder."""
    assert main(["pool", "moves", "--dir", str(checked_folder(short_path))])
    assert f"no holder of {short_path}" in capsys.readouterr().err
