"""`kvpipe engine` and `kvpipe cache` print an engine's answers so that no text in the answers controls the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpipe.cli import main as cli
from tests.manage.conftest import Managed
from tests.rigs.scheduler_world import SchedulerWorld

ODD = "x\x1b]0;mine\x07[red]y\n"


@pytest.mark.parametrize("words", [("engine", "state"), ("cache", "holders")])
def test_ids_of_requests_are_spelled_out(
    words: tuple[str, str], managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A client chooses the id of its request. Control sequences and line breaks in an id are shown as text."""
    managed.save("a", 20)
    again = managed.world.request("a", 30)
    again.request_id = ODD
    managed.world.admit(again)
    jobs = managed.world.step(again)
    with managed.idle():
        assert cli.main([*words, "--at", str(managed.address), "--token-file", str(tmp_path / "token")]) == 0
    shown = capsys.readouterr().out
    assert {"\x1b", "\x07"}.isdisjoint(shown)
    assert r"x\x1b]0;mine\x07[red]y\n" in shown
    managed.world.succeed(*jobs)


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The nested list of quotas is shown as a table of its own. Seconds are rounded, and numbers are aligned."""
    quotas = [{"name": "alice", "salt": "a", "share": 0.5}, {"name": "others", "limit": 0.25}]
    managed = Managed(tmp_path, SchedulerWorld(quotas=quotas))
    managed.save("a", 160, salt="a")
    at = ["--at", str(managed.address), "--token-file", str(tmp_path / "token")]
    assert cli.main(["engine", "state", *at]) == 0
    shown = capsys.readouterr().out
    managed.server.stop()
    assert re.search(r"^ up_s +[0-9]+(\.[0-9]{1,3})? *$", shown, re.MULTILINE)
    _, _, table = shown.partition("pool.quotas")
    lines = [line.rstrip() for line in table.splitlines() if line.strip("─ ")]
    assert [line.split() for line in lines[:3]] == [
        ["name", "slots", "slots_sure", "slots_max"], ["alice", "10", "128", "256"], ["others", "0", "0", "64"],
    ]  # fmt: skip
    assert len(set(map(len, lines[:3]))) == 1
