"""The pool's memory uses huge pages, is not inherited by forks, and is refused with a remedy if it is too large."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpipe.errors import ConfigError
from kvpipe.protocol.geometry import Geometry, Group, Layer
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
    """The pool's mapping is private, requests huge pages, and is not copied by a fork."""
    pool = HostPool(Geometry((GROUP,), 64, 64 << 20))
    flags = flags_at(pool.base)
    assert "dc" in flags, "do not copy on fork"
    assert "sh" not in flags, "not shared memory"
    assert ("hg" in flags) == pool.huge_pages


def test_a_pool_beyond_the_machine_is_refused() -> None:
    """The message names the key, the value and the remedy."""
    with pytest.raises(ConfigError, match=r"pool_bytes_max=\d+ cannot be reserved on this machine \(.+\); set a"):
        HostPool(Geometry((GROUP,), 64, 1 << 62))
