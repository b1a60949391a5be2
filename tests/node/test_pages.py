"""The holder gives memory in huge pages if the kernel allows them, and in small pages otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.machine.huge_pages import SharedHugePages, shared_huge_pages
from kvpipe.node import pages

MIB = 1 << 20
FILE_BYTES = 5 * MIB + 8192
HUGE = 2 * MIB


@pytest.fixture
def fd() -> Iterator[int]:
    """Return an empty sparse file in memory of `FILE_BYTES` bytes."""
    made = os.memfd_create("test")
    os.ftruncate(made, FILE_BYTES)
    yield made
    os.close(made)


def _memory_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _kernel_gives_more(found: int, expected: int) -> bool:
    """Whether this system's own setting explains more memory than expected. A test cannot change the setting."""
    return shared_huge_pages().mode not in {"", "never", "deny"} and found > expected


@pytest.mark.parametrize(
    ("at", "size", "expected"), [(0, 4096, HUGE), (HUGE - 4096, 8192, 2 * HUGE), (4 * MIB, MIB + 8192, MIB + 8192)]
)
def test_whole_huge_pages_get_memory_up_to_the_end_of_the_file(
    fd: int, at: int, size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were written earlier do not change."""
    os.pwrite(fd, b"chunk", at)
    monkeypatch.setattr(pages, "shared_huge_pages", lambda: SharedHugePages("advise", HUGE, Path()))
    pages.give_memory(fd, at, size)
    pages.give_memory(fd, at, size)
    assert _memory_bytes(fd) == expected or _kernel_gives_more(_memory_bytes(fd), expected)
    assert os.pread(fd, 8, at) == b"chunk\0\0\0"


def test_range_alone_gets_memory_without_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the setting `never`, no byte outside of the range gets memory."""
    monkeypatch.setattr(pages, "shared_huge_pages", lambda: SharedHugePages("never", HUGE, Path()))
    assert not pages.give_memory(fd, 4096, 8192)
    assert _memory_bytes(fd) == 8192 or _kernel_gives_more(_memory_bytes(fd), 8192)


@pytest.mark.parametrize(("mapped", "expected"), [("2048 kB", True), ("0 kB", False)])
def test_result_tells_which_pages_the_kernel_has_given(
    fd: int, mapped: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that allows huge pages may still give small ones, for example if its memory is fragmented."""
    (tmp_path / "rollup").write_text(f"Rss: 8 kB\nShmemPmdMapped: {mapped}\n", encoding="ascii")
    monkeypatch.setattr(pages, "ROLLUP", tmp_path / "rollup")
    monkeypatch.setattr(pages, "shared_huge_pages", lambda: SharedHugePages("advise", HUGE, Path()))
    assert pages.give_memory(fd, 0, HUGE) == expected


@pytest.mark.parametrize(
    ("files", "mode", "file"),
    [
        ({"shmem_enabled": "always [advise] never"}, "advise", "shmem_enabled"),
        ({"shmem_enabled": "always [never]", "hugepages-2048kB/shmem_enabled": "[always] inherit never"}, "always",
         "hugepages-2048kB/shmem_enabled"),
        ({"shmem_enabled": "[always] never", "hugepages-2048kB/shmem_enabled": "always [inherit] never"}, "always",
         "shmem_enabled"),
        ({"shmem_enabled": "always [deny]", "hugepages-2048kB/shmem_enabled": "[always] inherit never"}, "deny",
         "shmem_enabled"),
    ],
)  # fmt: skip
def test_huge_pages_follow_the_setting_of_the_kernel(
    tmp_path: Path, files: dict[str, str], mode: str, file: str
) -> None:
    """The setting for one size of pages counts, unless it inherits the setting for all sizes."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}\n", encoding="ascii")
    found = shared_huge_pages(tmp_path)
    assert found == SharedHugePages(mode, HUGE, tmp_path / file)
    assert found.allowed == (mode in {"always", "advise"})


def test_kernel_without_huge_pages_allows_none(tmp_path: Path) -> None:
    """The file with the setting does not exist on such a kernel."""
    assert not shared_huge_pages(tmp_path).allowed
