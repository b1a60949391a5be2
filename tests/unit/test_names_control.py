"""Named caches refuse a second layout; the control file says on, off or nothing."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kvpipe.control import read_freeze, watch_control_file, write_freeze
from kvpipe.errors import ConfigError
from kvpipe.names import NameClaim, default_state_dir
from tests.unit.fakes import WAIT_S

FACTS = {"dtype": "bf16", "layers": ("a", "b"), "block": 16}


def test_engines_of_one_layout_share_a_name(tmp_path: Path) -> None:
    """Two claims with the same facts stand beside each other, tuples and all."""
    claims = [NameClaim("docs", FACTS, tmp_path) for _ in range(3)]
    for claim in claims:
        claim.release()
        claim.release()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    """Different facts are refused with the name, the key, both values and the remedy; another name is free."""
    held = NameClaim("docs", FACTS, tmp_path)
    with pytest.raises(ConfigError) as caught:
        NameClaim("docs", FACTS | {"dtype": "fp8"}, tmp_path)
    message = str(caught.value)
    for part in ("name='docs'", "dtype", "'bf16'", "'fp8'", "choose another name"):
        assert part in message
    with pytest.raises(ConfigError, match="lora"):
        NameClaim("docs", FACTS | {"lora": True}, tmp_path)
    NameClaim("other", {"dtype": "fp8"}, tmp_path).release()
    held.release()


def test_a_refused_claim_holds_nothing(tmp_path: Path) -> None:
    """After the holder is gone, the layout that was refused before gets the name."""
    held = NameClaim("docs", FACTS, tmp_path)
    with pytest.raises(ConfigError):
        NameClaim("docs", {"dtype": "fp8"}, tmp_path)
    held.release()
    NameClaim("docs", {"dtype": "fp8"}, tmp_path).release()


def test_the_last_holder_counts(tmp_path: Path) -> None:
    """The record stays while any engine that shares the name lives, not only the first."""
    first, second = NameClaim("docs", FACTS, tmp_path), NameClaim("docs", FACTS, tmp_path)
    first.release()
    with pytest.raises(ConfigError, match="block"):
        NameClaim("docs", FACTS | {"block": 32}, tmp_path)
    second.release()


@pytest.mark.parametrize("stale", ['{"dtype": "fp8"}', "garbage", ""])
def test_a_stale_record_is_replaced(tmp_path: Path, stale: str) -> None:
    """What a dead engine left, whatever it is, is replaced and then binding."""
    (tmp_path / "docs.json").write_text(stale, encoding="utf-8")
    held = NameClaim("docs", FACTS, tmp_path)
    NameClaim("docs", FACTS, tmp_path).release()
    with pytest.raises(ConfigError, match="dtype"):
        NameClaim("docs", FACTS | {"dtype": "fp8"}, tmp_path)
    held.release()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "a b", "docs\n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    """A name that could leave the folder is refused, and nothing is written."""
    with pytest.raises(ConfigError, match="is not valid; use letters"):
        NameClaim(name, FACTS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_state_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_STATE_HOME wins over ~/.local/state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "kvpipe"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_state_dir() == tmp_path / "home" / ".local" / "state" / "kvpipe"


@pytest.mark.parametrize("on", [True, False])
def test_freeze_roundtrip(tmp_path: Path, *, on: bool) -> None:
    """What is written is read, in a folder that did not exist, and no partial file is left."""
    path = tmp_path / "new" / "control"
    write_freeze(path, on=on)
    assert read_freeze(path.read_text(encoding="utf-8")) is on
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "freeze", "freeze:", "freeze: maybe", "thaw: on", "on", "freeze: on off", "\0"])
def test_garbage_says_nothing(text: str) -> None:
    """A file that is not understood changes nothing."""
    assert read_freeze(text) is None


@pytest.mark.parametrize(("text", "on"), [("freeze: on", True), (" freeze :OFF \n\n", False)])
def test_spelling_is_forgiving(text: str, *, on: bool) -> None:
    """Case and blanks do not matter."""
    assert read_freeze(text) is on


def test_the_watcher_reports_changes_only_and_survives_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent file, bytes that are no text and repetitions are silent; each change is reported once."""
    path = tmp_path / "control"
    contents = [None, b"\xff\xfe", b"freeze: on", b"freeze: on", b"nonsense", b"freeze: on", b"freeze: off"]
    told: list[bool] = []

    async def play() -> None:
        turns = iter(contents)

        async def next_content(_seconds: float) -> None:
            content = next(turns, b"end")
            if content == b"end":
                group.cancel_scope.cancel()
            elif content is not None:
                path.write_bytes(content)
            await anyio.lowlevel.checkpoint()

        monkeypatch.setattr("kvpipe.control.anyio.sleep", next_content)
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(watch_control_file, path, told.append)

    anyio.run(play)
    assert told == [True, False]
