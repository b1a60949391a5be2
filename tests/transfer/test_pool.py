"""The pool's memory: huge pages where the system has them, out of children's reach, a clear word if it is too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpipe.errors import ConfigError
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.transfer.pool import HostPool

GROUP = Group((Layer("a", 4096),), block_tokens=16)


def flags_at(address: int) -> set[str]:
    """Return the kernel's flags of the mapping at an address of this process."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError("no such mapping")


def test_children_do_not_get_the_pool() -> None:
    """A page that a device reads and writes is never copied by a fork; huge pages are asked for; nothing is shared."""
    pool = HostPool(Geometry((GROUP,), 64, 64 << 20))
    flags = flags_at(pool.base)
    assert "dc" in flags, "do not copy on fork"
    assert "sh" not in flags, "not shared memory"
    assert ("hg" in flags) == pool.huge_pages


def test_a_pool_beyond_the_machine_is_refused() -> None:
    """The sentence names the key, the value and the remedy."""
    with pytest.raises(ConfigError, match=r"pool_bytes_max=\d+ cannot be had on this machine \(.+\); set a smaller"):
        HostPool(Geometry((GROUP,), 64, 1 << 62))
