"""What `kvpipe engine` and `kvpipe cache` print of an engine's answers: nothing in them is obeyed by a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpipe.cli import main as cli
from tests.manage.conftest import Managed

ODD = "x\x1b]0;mine\x07[red]y\n"


@pytest.mark.parametrize("words", [("engine", "state"), ("cache", "holders")])
def test_ids_of_requests_are_spelled_out(
    words: tuple[str, str], managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A client names its request as it likes; a title for the window, colours and lines in it are shown as text."""
    managed.save("a", 20)
    again = managed.world.request("a", 30)
    again.request_id = ODD
    managed.world.admit(again)
    jobs = managed.world.step(again)
    assert cli.main([*words, "--at", str(managed.address), "--token-file", str(tmp_path / "token")]) == 0
    shown = capsys.readouterr().out
    assert {"\x1b", "\x07"}.isdisjoint(shown)
    assert r"x\x1b]0;mine\x07[red]y\n" in shown
    managed.world.succeed(*jobs)
