"""How much memory is left to allocate: what the system has available, and what the process's control groups leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVE_SHARE: Final = 0.05  # of what a limit allows, left to others …
RESERVE_BYTES_MAX: Final = 1 << 30  # … but no more than this


class Headroom(NamedTuple):
    """`free` of `total` bytes are left. `where`: the limit's source, for messages. Ordered by `free`."""

    free: int
    total: int
    where: str

    @property
    def spare(self) -> int:
        """The number of bytes that may be taken, with a reserve left for other processes; may be negative."""
        return self.free - min(int(self.total * RESERVE_SHARE), RESERVE_BYTES_MAX)


def system_room(proc: Path) -> Headroom:
    """Return what the system has available, by `proc`/meminfo. Raises OSError if that does not report it."""
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
    """Yield what each memory limit of this process's control groups leaves; both versions of cgroups are read.

    Cached file pages that are not in use are counted as free: the kernel drops them first.
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
        if ".." in parts:  # a group outside of this namespace
            parts = []
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            try:
                most = (folder / limit).read_text(encoding="utf-8").strip()
                used = int((folder / usage).read_text(encoding="utf-8"))
                stat = (folder / "memory.stat").read_text(encoding="utf-8")
            except OSError:  # not mounted here, or the root, which has no limit
                continue
            if most != "max":  # version 1 has a number beyond any memory instead
                idle = dict(row.split(maxsplit=1) for row in stat.splitlines()).get(cached, "0")
                yield Headroom(int(most) - used + int(idle), int(most), f"cgroup limit {int(most) / (1 << 30):.1f}GiB")


def tightest(proc: Path = PROC, cgroups: Path = CGROUPS) -> Headroom | None:
    """Return the smallest of all rooms; None on a system that reports none."""
    rooms: list[Headroom] = []
    with contextlib.suppress(OSError, ValueError):
        rooms += [system_room(proc)]
    with contextlib.suppress(OSError, ValueError):
        rooms += cgroup_rooms(proc, cgroups)
    return min(rooms, default=None)
