"""Checks of the places where kvpipe writes: its folders and files, the pool, the tiers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpipe.cli.doctor.facts import HostFacts, probe_geometry
from kvpipe.cli.doctor.findings import PendingFinding, Status, one_line, size_of
from kvpipe.config.control import validate_control_file as check_path
from kvpipe.config.settings import Settings
from kvpipe.config.tracing import validate_trace_file as check_trace_path
from kvpipe.inputs import files
from kvpipe.inputs.cache_names import default_state_dir
from kvpipe.inputs.values import size_text
from kvpipe.node import fence
from kvpipe.node.health import health_of
from kvpipe.node.messages import MemoryStatus
from kvpipe.node.processes import checked_folder, folder_of_user
from kvpipe.statemachine.node_client import ENDING
from kvpipe.trace.log import printable

STATE_FREE_BYTES_MIN: Final = 1 << 20
PROBE_BYTES_MAX: Final = 16 << 20


def check_state_dir(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Check that the state folder can be written. Named caches and digests of weights are stored there."""
    if not settings.name and not settings.tiers and settings.state_dir is None:
        return PendingFinding("ok", "not used, because neither `name` nor `tiers` is set")
    folder = settings.state_dir or default_state_dir()
    # only a warning without a name, because digests of weights can be computed again
    status: Status = "fail" if settings.name else "warn"
    remedy = "set state_dir to a folder that the engine's user may write to"
    try:
        free = _writable(folder, machine)
    except OSError as e:
        return PendingFinding(status, f"{folder} is not writable ({one_line(e)})", remedy)
    if free < STATE_FREE_BYTES_MIN:
        return PendingFinding(status, f"{folder} has only {size_of(free)} left", f"free some space, or {remedy}")
    return PendingFinding("ok", f"{folder} is writable")


def check_trace_file(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """Check that a trace can be written. Returns None if `trace_file` is not set.

    The engine does not create the folder of the trace.
    """
    path = settings.trace_file
    if path is None:
        return None
    folder = path.parent
    remedy = "set trace_file to a path in a folder that exists and that the engine's user may write to"
    try:
        if path.is_dir() or not folder.is_dir():
            detail = f"{path} is a folder" if path.is_dir() else f"{folder} is not a folder that exists"
            return PendingFinding("fail", f"{detail}, so nothing would be traced", remedy)
        check_trace_path(path)
        if path.exists() and not path.is_file():
            return PendingFinding("ok", f"{path} is a pipe or a device")
        free = _writable(folder, machine)
    except OSError as e:
        return PendingFinding("fail", f"{folder} is not writable ({one_line(e)}), so nothing would be traced", remedy)
    most = int(settings.trace_bytes_max)
    detail, remedy = (
        files.doubts(path),
        "delete it, or name another file: only the owner can read a file that kvpipe creates",
    )
    if free < most:
        detail = f"{folder} has {size_of(free)} left, a trace grows to {size_of(most)}: events that do not fit are lost"
        remedy = "free some space, or set a smaller trace_bytes_max"
    if detail:
        return PendingFinding("warn", detail, remedy)
    return PendingFinding("ok", f"{folder} is writable and has {size_of(free)} left")


def check_control_file(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """Check that `kvpipe freeze` can write the control file, which the engine only reads.

    Returns None if `control_file` is not set.
    """
    path = settings.control_file
    if path is None:
        return None
    remedy = "set control_file to a file in a folder that the user who runs `kvpipe freeze` may write to"
    try:
        if path.is_dir():
            return PendingFinding("fail", f"{path} is a folder, so no engine can read it as a file", remedy)
        check_path(path)
        _writable(path.parent, machine)
    except OSError as e:
        detail = (
            f"{path.parent} is not writable for this user ({one_line(e)}), so `kvpipe freeze` will not work from here"
        )
        return PendingFinding("warn", detail, remedy)
    return PendingFinding("ok", f"{path.parent} is writable")


def _writable(folder: Path, machine: HostFacts) -> int:
    """Return the free bytes of the file system of `folder`. The folder may be missing.

    Raises `OSError` if the folder, or its nearest existing parent, is not writable.
    """
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=existing):
        return machine.free_bytes(existing)


def check_memory_pool(settings: Settings, _: HostFacts) -> PendingFinding:
    """Check that a small pool can be allocated, and that its slots keep the bytes that are written."""
    from kvpipe.transfer.pool import HostPool  # noqa: PLC0415  (imports torch)

    pool = HostPool(probe_geometry(min(PROBE_BYTES_MAX, int(settings.pool_bytes_max))))
    for slot in range(pool.slots):
        pool.slot(slot).fill_(slot % 251)
    bad = [slot for slot in range(pool.slots) if not bool((pool.slot(slot) == slot % 251).all())]
    if bad:
        detail = f"{len(bad)} of {pool.slots} slots returned other bytes than were written to them"
        return PendingFinding("fail", detail, "test this machine's memory")
    pages = "huge pages" if pool.huge_pages else "small pages only"
    return PendingFinding(
        "ok", f"a pool of {size_of(pool.slots * pool.slot_bytes)} was allocated, written and read ({pages})"
    )


def check_tiers(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Check that a small value can be written to, read from and deleted from each tier beyond memory.

    Returns None if there are no tiers.
    """
    from kvpipe.tiers.checkup import problem_of  # noqa: PLC0415  (imports their clients)
    from kvpipe.tiers.registry import named  # noqa: PLC0415

    if not settings.tiers:
        return None
    problems = {name: problem_of(name, spec) for name, spec in named(settings.tiers)}
    bad = "; ".join(f"{name}: {one_line(why)}" for name, why in problems.items() if why)
    if bad:
        return PendingFinding(
            "warn", bad, "an engine runs without this tier, with fewer hits, and uses the tier again once it works"
        )
    return PendingFinding("ok", f"a value was written, read and deleted: {', '.join(problems)}")


def check_first_hash(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """Check that block hashes in this environment equal the block hashes of the engines that have used the tiers.

    Returns None if no tier has a record of the block hashes of an engine.
    """
    from kvpipe.tiers.checkup import first_hash_in  # noqa: PLC0415  (imports their clients)
    from kvpipe.tiers.registry import named  # noqa: PLC0415

    left = {name: first_hash_in(name, spec) for name, spec in named(settings.tiers)}
    known = {name: first for name, first in left.items() if first}
    if not known:
        return None
    others = [name for name, first in known.items() if first != machine.first_hash(first.partition(" ")[0])]
    if others:
        detail = f"the last engine that used {', '.join(others)} had another PYTHONHASHSEED"
        detail += ", so it shares no chunks with engines here"
        return PendingFinding("warn", detail, "set the same PYTHONHASHSEED for all engines, or for none")
    return PendingFinding(
        "ok", f"block hashes have the same seed as those of the last engine that used {', '.join(known)}"
    )


def check_node_pool(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Check that engines of this node can share memory, and that the memory's holder works.

    Returns None without `pool: node`. The check fails if the folder or the socket belongs to another user.
    """
    if settings.pool == "private":
        return None
    fence.register_process()
    folder = checked_folder(settings.pool_dir or folder_of_user())
    health = health_of(folder)
    if not health.pid:
        return PendingFinding("ok", f"no memory yet; the first engine makes it at {folder}")
    if health.status is None:
        return PendingFinding("warn", f"process {health.pid} holds {folder}, but {health.why}", health.remedy)
    if not health.status.memories:
        return PendingFinding("ok", f"process {health.pid} holds {folder}; the first engine makes the memory")
    memories = health.status.memories
    doubts = [doubt for memory in memories for doubt in _engines_that_end(memory)]
    doubts = [*_lacking(settings, memories[0]), *doubts]  # [0]: the slot size of the memory's first engine
    sizes = ((memory.slots["slots"], size_text(memory.slot_bytes)) for memory in health.status.memories)
    titles = " and ".join(f"{slots:,} slots of {size}" for slots, size in sizes)
    engines = sum(len(memory.clients) for memory in health.status.memories)
    text = f"process {health.pid} holds {titles} at {folder}, for {engines} {'engine' if engines == 1 else 'engines'}"
    if not doubts:
        return PendingFinding("ok", text)
    return PendingFinding("warn", "; ".join([text, *(doubt for doubt, _ in doubts)]), doubts[0][1])


def _lacking(settings: Settings, memory: MemoryStatus) -> Iterator[tuple[str, str]]:
    """Yield a pair for each problem of a memory: (problem, solution)."""
    slots, unready = memory.slots["slots"], memory.slots["unready"]
    size, wanted = slots * memory.slot_bytes, int(settings.pool_bytes_max)
    if unready:
        free = "free memory, or raise the limit of the holder's control group; the holder tries again every 5 seconds"
        yield f"{unready:,} of its slots have no memory", free
    if "pool_bytes_max" in settings.model_fields_set and abs(size - wanted) >= memory.slot_bytes:
        detail = f"pool_bytes_max is {size_text(wanted)}, but the memory keeps the size of the engine that made it"
        yield detail, f"end all engines, and start them again after keep_s={settings.keep_s} seconds"


def _engines_that_end(memory: MemoryStatus) -> Iterator[tuple[str, str]]:
    """Yield a pair for each problem of an engine: (problem, solution)."""
    for engine in memory.clients:
        if engine.state == ENDING:
            rest, name = ", ".join(map(str, engine.pids)), printable(engine.name) or "an engine"
            yield f"{name} has ended in part and keeps {engine.granted} slots", f"end its other processes: {rest}"
