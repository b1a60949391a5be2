"""Tests how small files are read and replaced, and when kvpipe doubts a file because other users could change it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.inputs import files
from kvpipe.testing.logged import capture_logs
from kvpipe.tiers.disk.spec import DiskSpec

ME = 4711


def found(mode: int, uid: int) -> Any:
    """Return a path for which the system reports the given owner, mode and kind."""
    return SimpleNamespace(stat=lambda: SimpleNamespace(st_mode=mode, st_uid=uid))


@pytest.mark.parametrize(
    ("mode", "uid", "wanted"),
    [
        (stat.S_IFREG | 0o600, ME, ""),
        (stat.S_IFREG | 0o600, 0, ""),
        (stat.S_IFREG | 0o600, ME + 1, f"it belongs to uid {ME + 1}"),
        (stat.S_IFREG | 0o640, ME, "its mode 0640 lets others read it"),
        (stat.S_IFREG | 0o622, ME, "its mode 0622 lets others write it"),
        (stat.S_IFDIR | 0o755, ME, ""),
        (stat.S_IFDIR | 0o775, ME, ""),
        (stat.S_IFDIR | 0o777, ME, "everybody may write to it"),
        (stat.S_IFDIR | 0o1777, 0, "everybody may write to it"),
        (stat.S_IFDIR | 0o700, ME + 1, f"it belongs to uid {ME + 1}"),
        (stat.S_IFIFO | 0o666, ME, ""),
    ],
)
def test_files_that_others_can_write_are_doubted(
    mode: int, uid: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doubts are: another owner, except root, a file that others can use, a folder that everybody can write to."""
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    assert files.doubts(found(mode, uid)) == wanted


def test_missing_file_is_not_doubted(tmp_path: Path) -> None:
    """A file that does not exist is not doubted, because it will be created."""
    assert files.doubts(tmp_path / "none") == files.doubts(Path("a\0b")) == ""


def test_tier_in_a_folder_that_everybody_may_write_is_logged(tmp_path: Path) -> None:
    """Everybody may write to a tier's folder. The folder is used, and the log names the folder and the remedy.

    A private folder is not logged.
    """
    with capture_logs() as lines:
        for mode in (0o777, 0o700):
            tmp_path.chmod(mode)
            DiskSpec.model_validate({"path": tmp_path, "bytes_max": 1 << 20}).make("disk")
    (line,) = lines
    assert line["why"] == "everybody may write to it"
    assert "encryption_key_file" in line["remedy"]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096])
def test_a_file_is_read_up_to_its_bound(size: int, tmp_path: Path) -> None:
    """A file as long as the limit is read as a whole, even if a link leads to it. A longer file is refused."""
    (tmp_path / "file").write_bytes(b"x" * size)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        assert files.read_small(tmp_path / name, 4096) == b"x" * size
    if size:
        with pytest.raises(files.OddFileError, match=f"it is longer than {size - 1} bytes"):
            files.read_small(tmp_path / "file", size - 1)


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a write fails, the file keeps its old content, and no temporary file is left."""
    path = tmp_path / "file"
    files.replace_text(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        files.replace_text(path, "new")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text("utf-8") == "old"
