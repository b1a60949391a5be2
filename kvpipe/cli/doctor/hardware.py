"""Checks of the device, of processors and of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import PendingFinding, one_line, size_of
from kvpipe.config.settings import Settings
from kvpipe.errors import UsageError
from kvpipe.machine import headroom
from kvpipe.machine.cores import parse_cpus
from kvpipe.machine.huge_pages import shared_huge_pages
from kvpipe.node.health import health_of
from kvpipe.node.processes import folder_of_user

# a pool above this share of free memory gets a warning, because model and engine need memory, too
POOL_SHARE_WARN: Final = 0.8
POOL_SHARE_FAIL: Final = 1.0
PIN_BEYOND_BYTES: Final = 16 << 20
PIN_PROBE_BYTES_MAX: Final = 256 << 20
RESERVED_CPUS_PER_RANK: Final = 2  # as in vLLM's own default with a KV connector


def check_device(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that kvpipe can copy to and from the engine's device."""
    device = machine.device()
    if device.kind not in {"cuda", "cpu"}:
        detail = f"KV caches on device {device.kind!r} are not supported by this release"
        return PendingFinding("fail", detail, "use vLLM's CUDA or CPU build")
    return PendingFinding("ok", device.label)


def check_graphs(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Report the kind of CUDA graphs that vLLM captures in the configured mode."""
    if machine.device().kind != "cuda":
        return PendingFinding("ok", f"mode={settings.mode}; there are no CUDA graphs without a CUDA device")
    if settings.mode == "layerwise":
        detail = "mode=layerwise copies between layers: vLLM captures PIECEWISE graphs instead of full ones"
        return PendingFinding("ok", f"{detail}; mode=auto and mode=step keep full graphs")
    where = " in steps that are replayed" if settings.mode == "auto" else ""
    return PendingFinding(
        "ok", f"mode={settings.mode} copies after the forward{where}: vLLM keeps its full CUDA graphs"
    )


def check_locked_memory(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Check that the pool may be pinned.

    The driver may ignore the limit on locked memory. So the check pins a little more memory than the limit allows.
    """
    if machine.device().kind != "cuda":
        return PendingFinding("ok", "nothing is pinned without a CUDA device")
    limit, pool = machine.locked_bytes_max(), int(settings.pool_bytes_max)
    if limit is None or limit >= pool:
        return PendingFinding(
            "ok", f"the limit is {'none' if limit is None else size_of(limit)}, the pool {size_of(pool)}"
        )
    detail = f"the limit is {size_of(limit)}, less than the pool's {size_of(pool)}"
    remedy = (
        f"raise it (`ulimit -l`, `docker run --ulimit memlock=-1`, systemd `LimitMEMLOCK=infinity`) to {pool} bytes, "
        "or set a smaller pool_bytes_max"
    )
    probe = min(pool, limit + PIN_BEYOND_BYTES)
    if probe > PIN_PROBE_BYTES_MAX:
        return PendingFinding(
            "warn", f"{detail}: if the driver enforces the limit, copies to and from the rest are slower", remedy
        )
    try:
        machine.pin(probe)
    except Exception as e:  # noqa: BLE001  (copies work without pinned memory)
        why = f"{size_of(probe)} could not be pinned ({one_line(e)})"
        return PendingFinding("warn", f"{detail}, and {why}: copies are slower and block the host", remedy)
    return PendingFinding("ok", f"{detail}, but the driver still pins {size_of(probe)}")


def check_copy_core(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Check that on a CPU device, there is a core for copies to which vLLM binds no thread."""
    if machine.device().kind != "cpu":
        return PendingFinding("ok", "not needed, because the device's copy engines copy")
    if settings.copy_threads == 0:
        return PendingFinding("ok", "copy_threads=0: copies are made inside the forward")
    cpus = machine.cpus()
    spare, bind = _spare_cpus(machine, cpus), machine.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if spare > 0:
        return PendingFinding("ok", f"{spare} of {len(cpus)} cores left for copying (VLLM_CPU_OMP_THREADS_BIND={bind})")
    effect = "copies compete with the forward"
    if settings.copy_threads is None:
        effect = "copies are made inside the forward"
    detail = f"no core of {len(cpus)} is left for copying (VLLM_CPU_OMP_THREADS_BIND={bind}): {effect}"
    remedy = "set copy_threads to 0 to accept this"
    if len(cpus) > machine.ranks:
        free = ",".join(map(str, sorted(cpus)[: -machine.ranks]))
        given = free if machine.ranks == 1 else f"lists that together have the cores {free}"
        remedy = f"leave one core free for each rank, here with VLLM_CPU_OMP_THREADS_BIND={given}; or {remedy}"
    return PendingFinding("warn", detail, remedy)


def _spare_cpus(machine: HostFacts, cpus: frozenset[int]) -> int:
    """Count the cores that vLLM's CPU build will leave free, by the rules of `vllm/utils/ompmultiprocessing.py`."""
    bind = machine.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bind not in {"auto", "nobind"}:
        return len(cpus - frozenset().union(*map(parse_cpus, bind.split("|"))))
    used = len({_core(machine, cpu) for cpu in cpus})  # one thread per physical core
    if bind == "nobind":
        return len(cpus) - int(machine.environ.get("OMP_NUM_THREADS", used))
    reserved = int(machine.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", RESERVED_CPUS_PER_RANK * machine.ranks))
    return len(cpus) - (used - reserved if used > reserved else used)  # vLLM reserves no core if there are too few


def _core(machine: HostFacts, cpu: int) -> str:
    """Return a name of the physical core of a logical CPU."""
    path = machine.cpu_topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)


def check_memory(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Check that the ranks' pools, or the node's memory, fit into the free memory of the system and of the cgroups."""
    if settings.pool == "node" and _has_memory(settings.pool_dir or folder_of_user()):
        return PendingFinding("ok", "the node's memory is allocated already, or reserved: see the check `node pool`")
    pool, ranks = int(settings.pool_bytes_max), machine.ranks if settings.pool == "private" else 1
    rooms = [headroom.system_room(machine.proc), *headroom.cgroup_rooms(machine.proc, machine.cgroups)]
    free, _, where = min(rooms)
    share = pool * ranks / free if free > 0 else float("inf")
    pools = f"{size_of(pool)}" if ranks == 1 else f"{ranks} x {size_of(pool)}"
    detail = f"pool_bytes_max is {pools}, {size_of(max(free, 0))} are free ({where})"
    if share <= POOL_SHARE_WARN:
        fits = int(free * POOL_SHARE_WARN) // pool
        return PendingFinding(
            "ok", f"{detail}: {share:.0%}; there is room for {fits} {'rank' if fits == 1 else 'ranks'}"
        )
    fit = int(max(free, 0) * POOL_SHARE_WARN) // ranks >> 20
    remedy = f"set pool_bytes_max to {fit}MiB or less, or give the engine more memory" if fit else "free some memory"
    if share <= POOL_SHARE_FAIL:
        return PendingFinding(
            "warn", f"{detail}: {share:.0%}, which leaves little for the model and the engine", remedy
        )
    return PendingFinding(
        "fail", f"{detail}: the pool does not fit, and the engine would be killed as it fills", remedy
    )


def _has_memory(folder: Path) -> bool:
    """Return whether engines of this node share memory now. `check_node_pool` reports errors."""
    try:
        status = health_of(folder).status
    except UsageError:
        return False
    return status is not None and bool(status.memories)


def check_huge_pages(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """Check that the memory of a node gets huge pages. Returns None without `pool: node`."""
    if settings.pool == "private":
        return None
    found = shared_huge_pages(machine.huge_pages)
    if not found.mode:
        return PendingFinding("ok", "the kernel has no huge pages for shared memory")
    state = f"{found.file} is {found.mode!r}"
    if found.allowed:
        return PendingFinding("ok", f"{state}: the node's memory gets pages of {size_of(found.page_bytes)}")
    remedy = f"run `echo advise | sudo tee {found.file}`; a memory that exists keeps its pages"
    detail = f"{state}: the node's memory has small pages, so a new engine takes longer to map it"
    return PendingFinding("warn", detail, remedy)


def check_shared_memory(_: Settings, __: HostFacts) -> PendingFinding:
    """Report that kvpipe does not use /dev/shm, so that its size does not matter."""
    return PendingFinding(
        "ok", "not used, whatever its size: a private pool is memory of its rank, and a node's memory has no name"
    )
