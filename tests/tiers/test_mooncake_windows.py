"""Mooncake's client reads into slots through windows.

If a write may come late, its window's addresses are mapped to other memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from kvpipe.tiers.mooncake import child

PAGE = 4096


@pytest.fixture
def file() -> Iterator[int]:
    """Return a file in memory with a page of zeros and ten pages of slots."""
    fd = os.memfd_create("tests")
    os.ftruncate(fd, 11 * PAGE)
    yield fd
    os.close(fd)


def _write(at: int, text: bytes) -> None:
    ctypes.memmove(at, text, len(text))


def test_window_is_reused_until_a_write_may_be_late(file: int) -> None:
    """If a write may be late, the window's addresses lead to other memory, and are never used again."""
    windows, key = child.Windows(file, PAGE), (PAGE, 2 * PAGE, PAGE)
    (first,) = windows.open(1, [key])
    _write(first, b"header")
    _write(first + PAGE, b"body")
    assert os.pread(file, 4, 3 * PAGE) == b"body"
    windows.close(1, [False])
    assert windows.open(2, [key]) == [first]
    windows.close(2, [True])
    (second,) = windows.open(3, [key])
    assert second != first
    windows.revoke(3)
    for at in (first, second):
        _write(at + PAGE, b"late")
    assert os.pread(file, 4, 3 * PAGE) == b"body"
    windows.close(3, [False])
    assert windows.open(4, [key])[0] not in {first, second}


def test_revoked_read_does_not_begin(file: int) -> None:
    """A read may be revoked while it still waits behind a question of another lane."""
    windows = child.Windows(file, PAGE)
    windows.revoke(7)
    with pytest.raises(RuntimeError, match="given up"):
        windows.open(7, [(PAGE, 0, PAGE)])
    windows.close(7, [True])


def test_windows_of_a_read_that_cannot_begin_lead_to_no_slot(file: int) -> None:
    """The second slot cannot be mapped, because its place is not a whole number of pages."""
    windows, key = child.Windows(file, PAGE), (PAGE, 0, PAGE)
    (first,) = windows.open(1, [key])
    windows.close(1, [False])
    with pytest.raises(OSError, match="cannot be mapped"):
        windows.open(2, [key, (PAGE, 1, PAGE)])
    windows.close(2, [True, True])
    _write(first + PAGE, b"late")
    assert os.pread(file, 4, PAGE) == bytes(4)


def test_late_writes_share_memory(file: int) -> None:
    """All late writes go to the same memory of one value, even if a cluster hangs for hours."""
    windows, size = child.Windows(file, PAGE), 2 * PAGE
    (small,), (large,) = windows.open(1, [(PAGE, 0, PAGE)]), windows.open(2, [(PAGE, 2 * PAGE, size)])
    windows.revoke(1)
    windows.revoke(2)
    _write(large + PAGE, b"late")
    assert ctypes.string_at(small + PAGE, 4) == b"late"
    _write(large + PAGE + size - 4, b"late")
    assert os.pread(file, 11 * PAGE, 0) == bytes(11 * PAGE)


def test_windows_are_bounded(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many windows, the oldest is unmapped. A client with too many abandoned addresses ends."""
    monkeypatch.setattr(child, "WINDOWS_MAX", 2)
    monkeypatch.setattr(child, "LOST_MAX", 1)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    windows = child.Windows(file, PAGE)
    for fill in range(4):
        windows.open(fill, [(PAGE, fill * PAGE, PAGE)])
        windows.close(fill, [False])
    assert [place // PAGE for _, place, _ in windows._free] == [2, 3]
    for fill in (2, 3):
        assert not ended
        windows.open(fill, [(PAGE, fill * PAGE, PAGE)])
        windows.revoke(fill)
    assert ended == [1]


def test_client_whose_memory_cannot_be_replaced_ends(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process ends, the transfer stops, too."""
    ended: list[int] = []
    windows = child.Windows(file, PAGE)
    windows.open(1, [(PAGE, 0, PAGE)])

    def refuse(*_: object) -> int:
        raise OSError("no room")

    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(child, "_mapped", refuse)
    windows.close(1, [True])
    assert ended == [1]
