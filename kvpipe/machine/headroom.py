"""This module reads how much memory can be allocated, from the system's memory and the limits of control groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVE_SHARE: Final = 0.05  # the share of a limit that is reserved for other processes
RESERVE_BYTES_MAX: Final = 1 << 30  # the largest number of reserved bytes


class Headroom(NamedTuple):
    """A limit of `total` bytes of memory, of which `free` bytes are free. `where` is the limit's source, for messages.

    Headrooms are ordered by `free`.
    """

    free: int
    total: int
    where: str

    @property
    def spare(self) -> int:
        """The number of bytes that may be allocated, without the reserve for other processes.

        The number may be negative.
        """
        return self.free - min(int(self.total * RESERVE_SHARE), RESERVE_BYTES_MAX)


def system_room(proc: Path) -> Headroom:
    """Return the system's available memory, from `proc`/meminfo. Raises OSError if that file does not report it."""
    message = {}
    for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        message[key] = value
    if "MemAvailable" not in message:
        msg = f"{proc / 'meminfo'} has no line MemAvailable"
        raise OSError(msg)
    free, total = (int(message.get(key, "0").split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
    return Headroom(free, total, "MemAvailable")


def cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[Headroom]:
    """Yield the headroom of each memory limit of this process's control groups, of both versions of cgroups.

    Inactive pages of the file cache count as free, because the kernel drops these pages when memory is needed.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cached = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cached = cgroups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # the group is outside of this process's cgroup namespace, so only the root's limits are read
            parts = []
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            try:
                most = (folder / limit).read_text(encoding="utf-8").strip()
                used = int((folder / usage).read_text(encoding="utf-8"))
                stat = (folder / "memory.stat").read_text(encoding="utf-8")
            except OSError:  # the group is not mounted here, or is the root, which has no limit
                continue
            if most != "max":  # version 1 has no "max", but a number larger than any memory
                idle = dict(row.split(maxsplit=1) for row in stat.splitlines()).get(cached, "0")
                yield Headroom(int(most) - used + int(idle), int(most), f"cgroup limit {int(most) / (1 << 30):.1f}GiB")


def tightest(proc: Path = PROC, cgroups: Path = CGROUPS) -> Headroom | None:
    """Return the smallest headroom of all limits. Return None if the system reports no limit."""
    rooms: list[Headroom] = []
    with contextlib.suppress(OSError, ValueError):
        rooms += [system_room(proc)]
    with contextlib.suppress(OSError, ValueError):
        rooms += cgroup_rooms(proc, cgroups)
    return min(rooms, default=None)
