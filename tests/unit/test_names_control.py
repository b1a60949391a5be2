"""Tests of cache names, which refuse a second layout, and of the control file, which contains on or off."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from stat import S_IMODE
from typing import Any
from unittest.mock import Mock

import anyio
import pytest

from kvpipe.cli import main as cli
from kvpipe.config.control import read_freeze, validate_control_file, watch_control_file, write_freeze
from kvpipe.errors import ConfigError
from kvpipe.inputs.cache_names import NameClaim, default_state_dir
from kvpipe.testing.waiting import WAIT_S
from tests.rigs.forks import done_in_fork, forked

FACTS = {"dtype": "bf16", "layers": ("a", "b"), "block": 16}


def test_engines_of_one_layout_share_a_name(tmp_path: Path) -> None:
    """Two engines with equal facts may claim the same name, even if a fact is a tuple."""
    claims = [NameClaim("docs", FACTS, tmp_path) for _ in range(3)]
    for claim in claims:
        claim.release()
        claim.release()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    """Under one name, other facts are refused with the name, the key, both values and the remedy.

    Another name is accepted.
    """
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
    """A refused claim leaves nothing behind: when the engine that has the name has ended, the same claim succeeds."""
    held = NameClaim("docs", FACTS, tmp_path)
    with pytest.raises(ConfigError):
        NameClaim("docs", {"dtype": "fp8"}, tmp_path)
    held.release()
    NameClaim("docs", {"dtype": "fp8"}, tmp_path).release()


def test_the_last_holder_counts(tmp_path: Path) -> None:
    """The record stays as long as any engine with this name runs, not only the first engine."""
    first, second = NameClaim("docs", FACTS, tmp_path), NameClaim("docs", FACTS, tmp_path)
    first.release()
    with pytest.raises(ConfigError, match="block"):
        NameClaim("docs", FACTS | {"block": 32}, tmp_path)
    second.release()


def test_a_fork_neither_releases_nor_keeps_a_name(tmp_path: Path) -> None:
    """A fork has a copy of the record's lock.

    The fork's end does not release the lock. The engine's end releases it.
    """
    held = NameClaim("docs", FACTS, tmp_path)
    assert done_in_fork(held.release)
    with pytest.raises(ConfigError, match="is used by a running engine"):
        NameClaim("docs", {"dtype": "fp8"}, tmp_path)
    with forked():
        held.release()
        NameClaim("docs", {"dtype": "fp8"}, tmp_path).release()


@pytest.mark.parametrize("stale", ['{"dtype": "fp8"}', "garbage", ""])
def test_a_stale_record_is_replaced(tmp_path: Path, stale: str) -> None:
    """The record of a dead engine is replaced, whatever its content. The new record counts for later engines."""
    (tmp_path / "docs.json").write_text(stale, encoding="utf-8")
    held = NameClaim("docs", FACTS, tmp_path)
    NameClaim("docs", FACTS, tmp_path).release()
    with pytest.raises(ConfigError, match="dtype"):
        NameClaim("docs", FACTS | {"dtype": "fp8"}, tmp_path)
    held.release()


@pytest.mark.parametrize(
    "damage", ["garbage", "[1]", "{" * 100_000, '{"a": ' + "9" * 5000 + "}", "x" * (2 << 20), "\0"]
)
def test_a_damaged_record_that_is_held_is_one_sentence(tmp_path: Path, damage: str) -> None:
    """The message names the record, its holder and the remedy. A damaged record without a holder is replaced."""
    held = NameClaim("docs", FACTS, tmp_path)
    (tmp_path / "docs.json").write_text(damage, encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"its record '.+docs.json' is damaged, .+ delete the file, or choose"
    ) as caught:
        NameClaim("docs", FACTS, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    held.release()
    NameClaim("docs", FACTS, tmp_path).release()


LOCKER = """
import fcntl, sys, time
file = open(sys.argv[1])  # reading is enough for a lock
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_lock_of_another_process_delays_an_engine_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps a record locked. An engine does not hang because of this: its error names the process."""
    monkeypatch.setattr("kvpipe.inputs.cache_names.LOCK_S_MAX", 0.3)
    NameClaim("docs", FACTS, tmp_path).release()
    locker = subprocess.Popen([sys.executable, "-c", LOCKER, str(tmp_path / "docs.json")], stdout=subprocess.PIPE)
    try:
        assert locker.stdout is not None
        assert locker.stdout.readline() == b"locked\n"
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"has been locked for .+; end that process, or choose") as caught:
            NameClaim("docs", FACTS, tmp_path)
        assert time.monotonic() - begin < WAIT_S
        seen = any(f" {locker.pid} " in line for line in Path("/proc/locks").read_text("ascii").splitlines())
        assert (f"process {locker.pid} (" in str(caught.value)) == seen, "where the system shows locks"
    finally:
        locker.kill()
        locker.communicate()
    NameClaim("docs", FACTS, tmp_path).release()


def test_engine_waits_for_a_lock_that_is_released_soon(tmp_path: Path) -> None:
    """An engine that is writing its record delays another engine only for a moment."""
    NameClaim("docs", FACTS, tmp_path).release()
    with (tmp_path / "docs.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(0.2, fcntl.flock, (file, fcntl.LOCK_SH))
        timer.start()
        NameClaim("docs", FACTS, tmp_path).release()
        timer.join()


def test_engines_that_claim_a_name_at_once_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine changes its exclusive lock into a shared lock, and for a moment has neither.

    Another engine may lock the record in this moment.
    """
    flock, others = fcntl.flock, list[int]()

    def interrupted(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH | fcntl.LOCK_NB and not others:
            flock(fd, fcntl.LOCK_UN)
            others.append(os.open(tmp_path / "docs.json", os.O_RDWR))
            flock(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            threading.Timer(0.1, flock, (others[0], fcntl.LOCK_SH)).start()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    NameClaim("docs", FACTS, tmp_path).release()
    os.close(others[0])


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "file for a folder", "zero byte"])
def test_a_record_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """The record is a folder, a pipe or a link, or the state folder is no folder.

    The record is refused at once and in one sentence.
    """
    record, state = tmp_path / "docs.json", tmp_path
    if kind == "folder":
        record.mkdir()
    elif kind == "pipe":
        os.mkfifo(record)
    elif kind == "link":
        record.symlink_to(tmp_path / "beyond")
    elif kind == "file for a folder":
        state = tmp_path / "file"
        state.touch()
    else:
        state = Path("/a\0b")
    with pytest.raises(
        ConfigError, match=r"name='docs': its record .+ cannot be used \(.+\); set state_dir to a folder"
    ):
        NameClaim("docs", FACTS, state)
    assert not (tmp_path / "beyond").exists()


def test_a_record_is_its_owners_alone(tmp_path: Path) -> None:
    """The record and its folder are private. So other users cannot even lock the record."""
    before = os.umask(0)
    try:
        NameClaim("docs", FACTS, tmp_path / "state").release()
    finally:
        os.umask(before)
    assert S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert S_IMODE((tmp_path / "state" / "docs.json").stat().st_mode) == 0o600


def test_unknown_home_folder_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system does not know the user's home folder, the message names `state_dir` as the remedy."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("kvpipe.inputs.cache_names.default_state_dir", nowhere)
    with pytest.raises(ConfigError, match="set state_dir"):
        NameClaim("docs", FACTS)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "a b", "docs\n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    """A name that would lead out of the folder is refused, and no file is written."""
    with pytest.raises(ConfigError, match="is not valid; use letters"):
        NameClaim(name, FACTS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_state_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_STATE_HOME takes precedence over ~/.local/state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "kvpipe"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_state_dir() == tmp_path / "home" / ".local" / "state" / "kvpipe"


@pytest.mark.parametrize("on", [True, False])
def test_written_freeze_is_read_back(tmp_path: Path, *, on: bool) -> None:
    """A written state is read back. The folder did not exist before, and no temporary file is left."""
    path = tmp_path / "new" / "control"
    write_freeze(path, on=on)
    assert read_freeze(path.read_text(encoding="utf-8")) is on
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "below a file", "zero byte", "read only"])
def test_file_that_cannot_be_written_is_one_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvpipe freeze` reports a file that it cannot write in one line, with status 2."""
    path = tmp_path / "control"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "beyond")
    elif kind == "below a file":
        path.touch()
        path = path / "control"
    elif kind == "zero byte":
        path = Path("a\0b")
    else:
        monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert cli.main(["freeze", "on", str(path)]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"kvpipe: control_file='.+' cannot be written \(.+\); name a file in a folder .+\n", message)
    assert not (tmp_path / "beyond").exists()


def test_drafts_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each temporary file has a new name, is not opened if the name exists, and is removed afterwards."""
    path, seen = tmp_path / "control", []
    real = os.open

    def noted(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        seen.append((str(name), flags))
        return real(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", noted)
    for on in (True, False):
        write_freeze(path, on=on)
    (one, flags), (other, _) = seen
    assert one != other
    assert flags & os.O_EXCL
    assert flags & os.O_NOFOLLOW
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop"])
def test_an_engine_does_not_start_with_an_odd_control_file(kind: str, tmp_path: Path) -> None:
    """If the control file is a folder, a pipe, a device or a loop of links, the engine does not start.

    A control file need not exist.
    """
    path = tmp_path / "control"
    validate_control_file(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to(path)
    with pytest.raises(ConfigError, match=r"control_file='.+' is .+; name a file, which need not exist yet"):
        validate_control_file(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_pipe_does_not_block_the_watcher(kind: str, tmp_path: Path) -> None:
    """The watcher skips a pipe, an endless device or a long file. Then the watcher obeys a valid file again."""
    path = tmp_path / "control"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"freeze: on" + b" " * (64 << 20))
    reported: list[bool] = []

    async def play() -> None:
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(watch_control_file, path, reported.append)
                await anyio.sleep(0.2)
                assert reported == []
                path.unlink()
                write_freeze(path, on=True)
                while not reported:  # noqa: ASYNC110  (nothing notifies)
                    await anyio.sleep(0.02)
                group.cancel_scope.cancel()

    anyio.run(play)
    assert reported == [True]


@pytest.mark.parametrize("text", ["", "freeze", "freeze:", "freeze: maybe", "thaw: on", "on", "freeze: on off", "\0"])
def test_unreadable_control_file_changes_nothing(text: str) -> None:
    """A control file with any other text changes nothing."""
    assert read_freeze(text) is None


@pytest.mark.parametrize(("text", "on"), [("freeze: on", True), (" freeze :OFF \n\n", False)])
def test_case_and_blanks_do_not_matter(text: str, *, on: bool) -> None:
    """Neither the case of letters nor the number of blanks matters in a control file."""
    assert read_freeze(text) is on


def test_the_watcher_reports_changes_only_and_survives_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher reports each change once. An absent file, bytes that are no text, and repetitions are ignored."""
    path = tmp_path / "control"
    contents = [None, b"\xff\xfe", b"freeze: on", b"freeze: on", b"nonsense", b"freeze: on", b"freeze: off"]
    reported: list[bool] = []

    async def play() -> None:
        turns = iter(contents)

        async def next_content(_seconds: float) -> None:
            content = next(turns, b"end")
            if content == b"end":
                group.cancel_scope.cancel()
            elif content is not None:
                path.write_bytes(content)
            await anyio.lowlevel.checkpoint()

        monkeypatch.setattr("kvpipe.config.control.anyio.sleep", next_content)
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(watch_control_file, path, reported.append)

    anyio.run(play)
    assert reported == [True, False]
