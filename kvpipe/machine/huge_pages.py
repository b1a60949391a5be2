"""This module reads whether the kernel gives huge pages to shared memory, such as a memfd."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, NamedTuple

HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
_ALLOWS: Final = frozenset({"always", "within_size", "advise", "force"})


class SharedHugePages(NamedTuple):
    """The kernel's setting for huge pages of shared memory.

    `file` has the setting. `mode` is the setting's value, and `page_bytes` the size of a huge page. If the kernel has
    no huge pages, `mode` is "" and `page_bytes` is 0.
    """

    mode: str
    page_bytes: int
    file: Path

    @property
    def allowed(self) -> bool:
        """Whether memory gets huge pages if its mapping asks for them with ``MADV_HUGEPAGE``."""
        return self.mode in _ALLOWS


def shared_huge_pages(folder: Path = HUGE_PAGES) -> SharedHugePages:
    """Return the setting for huge pages of the largest size that the kernel maps with one entry.

    Newer kernels have one file per page size. Such a file may contain `inherit`, and then the file for all sizes
    counts.
    """
    for_all = folder / "shmem_enabled"
    with contextlib.suppress(OSError, ValueError):
        size = int((folder / "hpage_pmd_size").read_text(encoding="ascii"))
        of_size = folder / f"hugepages-{size >> 10}kB" / "shmem_enabled"
        if _chosen(for_all) != "deny" and of_size.exists() and (mode := _chosen(of_size)) != "inherit":
            return SharedHugePages(mode, size, of_size)
        return SharedHugePages(_chosen(for_all), size, for_all)
    return SharedHugePages("", 0, for_all)


def _chosen(file: Path) -> str:
    """Return the chosen value of a setting, which is the value in brackets, or "".

    Raises OSError if the file is missing.
    """
    return next((word[1:-1] for word in file.read_text(encoding="ascii").split() if word[:1] == "["), "")
