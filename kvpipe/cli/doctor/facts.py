"""Facts about this machine for `kvpipe doctor`: versions, the device, limits, processors.

Functions import vLLM and torch only when they are called, so `kvpipe doctor` works without these packages. The
connector's module `kvpipe/connectors/vllm/doctor_facts.py` supplies the facts about vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, NamedTuple

from kvpipe.cli.doctor.engine import connector_part
from kvpipe.machine import headroom
from kvpipe.machine.huge_pages import HUGE_PAGES
from kvpipe.protocol.geometry import Geometry, Group, Layer

PLUGIN: Final = "kvpipe"
"""The name of the entry point by which vLLM loads kvpipe."""
VLLM: Final = connector_part("doctor_facts")


class DeviceFacts(NamedTuple):
    """The device on which the engine computes. `kind`: torch's name ("cuda", "cpu"). `label`: a text for users."""

    kind: str
    label: str


class HashSeeds(NamedTuple):
    """vLLM's prefix hash algorithms. `default` is the default algorithm.

    `random` has the algorithms whose seed is random unless PYTHONHASHSEED is set.
    """

    default: str
    random: frozenset[str]


def _torch_version() -> str:
    import torch  # noqa: PLC0415

    return str(torch.__version__)


def _plugins() -> Sequence[EntryPoint]:
    return list(entry_points(group=VLLM.GROUP, name=PLUGIN))


def _hash_seeds() -> HashSeeds:
    return HashSeeds(*VLLM.hash_seeds())


def _device() -> DeviceFacts:
    """Return the device on which vLLM computes. Without a working vLLM, return the device that torch finds."""
    import torch  # noqa: PLC0415

    try:
        kind = VLLM.device_type()
    except Exception:  # noqa: BLE001  (the check of vLLM itself reports the error)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        return DeviceFacts(kind, f"CUDA, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return DeviceFacts(kind, kind.upper())


def _locked_bytes_max() -> int | None:
    """Return the soft limit on locked memory in bytes, or None if there is no limit."""
    import resource  # noqa: PLC0415  (not every system has this module)

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _pin(size: int) -> None:
    """Pin `size` bytes of host memory and unpin them. Raises `TransferError` if the driver refuses."""
    import torch  # noqa: PLC0415

    from kvpipe.transfer.device import CudaDevice  # noqa: PLC0415
    from kvpipe.transfer.pool import HostPool  # noqa: PLC0415

    pool, device = HostPool(probe_geometry(size)), CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    device.enter_thread()
    device.register(pool.base, pool.slots * pool.slot_bytes)
    device.unregister(pool.base)


def _cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def probe_geometry(size: int) -> Geometry:
    """Return the geometry of a pool of `size` bytes with slots of at most 1 MiB.

    Raises `ConfigError` if `size` is less than one page.
    """
    return Geometry((Group((Layer("probe", min(size, 1 << 20)),), 1),), chunk_tokens=1, pool_bytes_max=size)


class HostFacts(NamedTuple):
    """The facts that checks use. `ranks` is the number of engine ranks on this host, each with its own pool.

    `connectors` has vLLM's connectors, in the order in which vLLM asks them. If unknown, `connectors` is empty.
    """

    ranks: int = 1
    connectors: tuple[str, ...] = ()
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    environ: Mapping[str, str] = os.environ
    proc: Path = headroom.PROC
    cgroups: Path = headroom.CGROUPS
    cpu_topology: Path = Path("/sys/devices/system/cpu")
    huge_pages: Path = HUGE_PAGES
    torch_version: Callable[[], str] = _torch_version
    vllm_version: Callable[[], str | None] = VLLM.version
    plugins: Callable[[], Sequence[EntryPoint]] = _plugins
    connector_known: Callable[[], bool] = VLLM.connector_known
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
    hash_seeds: Callable[[], HashSeeds] = _hash_seeds
    first_hash: Callable[[str], str] = VLLM.first_hash
    device: Callable[[], DeviceFacts] = _device
    locked_bytes_max: Callable[[], int | None] = _locked_bytes_max
    pin: Callable[[int], None] = _pin
    cpus: Callable[[], frozenset[int]] = _cpus
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
