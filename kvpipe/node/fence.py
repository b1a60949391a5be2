"""The fence between a client's pin and the holder's eviction.

A client stores a lease and then loads a generation. The holder stores a generation and then loads leases. A processor
may reorder a store and a later load, so that neither process sees the store of the other process. `membarrier` makes
every thread of every registered process pass a full fence. The holder calls `membarrier` between the holder's store and
loads, so clients need no fence.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

from kvpipe.errors import ConfigError

_NUMBERS: Final = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2
_libc = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> None:
    number = _NUMBERS.get(platform.machine())
    if number is None or _libc.syscall(number, command, 0, 0) != 0:
        raise ConfigError(
            f"membarrier is not available ({platform.machine()}, errno {ctypes.get_errno()}), so engines cannot share "
            "memory here: allow it in the container's seccomp profile, or use private pools"
        )


def register_process() -> None:
    """Make `fence` in other processes act on this process's threads. Called before the first pin, and after a fork.

    Raises:
        ConfigError: the system has no `membarrier`.

    """
    _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def fence() -> None:
    """Make every thread of every registered process pass a full fence. The call takes some microseconds.

    Raises:
        ConfigError: the system has no `membarrier`.

    """
    _membarrier(_GLOBAL_EXPEDITED)
