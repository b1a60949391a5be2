"""Checks of where kvpipe writes: its folders and files, the pool, the tiers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from kvpipe import files
from kvpipe.cli.doctor.facts import HostFacts, probe_geometry
from kvpipe.cli.doctor.findings import PendingFinding, Status, one_line, size_of
from kvpipe.config import Settings
from kvpipe.control import check_control_file as check_path
from kvpipe.names import default_state_dir
from kvpipe.trace.setup import check_trace_file as check_trace_path

STATE_FREE_BYTES_MIN: Final = 1 << 20
PROBE_BYTES_MAX: Final = 16 << 20


def check_state_dir(settings: Settings, machine: HostFacts) -> PendingFinding:
    """The state folder can be written, for named caches and for digests of weights."""
    if not settings.name and not settings.tiers and settings.state_dir is None:
        return PendingFinding("ok", "not used without a name, or tiers")
    folder = settings.state_dir or default_state_dir()
    status: Status = "fail" if settings.name else "warn"  # without a name nothing is written
    remedy = "set state_dir to a folder that the engine's user may write to"
    try:
        free = _writable(folder, machine)
    except OSError as e:
        return PendingFinding(status, f"{folder} is not writable ({one_line(e)})", remedy)
    if free < STATE_FREE_BYTES_MIN:
        return PendingFinding(status, f"{folder} has only {size_of(free)} left", f"free some space, or {remedy}")
    return PendingFinding("ok", f"{folder} is writable")


def check_trace_file(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """A trace can be written. None where the settings name no file for it. The engine does not make its folder."""
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
    detail, remedy = files.doubts(path), "delete it, or name another: a new one is its owner's alone"
    if free < most:
        detail = f"{folder} has {size_of(free)} left, a trace grows to {size_of(most)}: what does not fit is lost"
        remedy = "free some space, or set a smaller trace_bytes_max"
    if detail:
        return PendingFinding("warn", detail, remedy)
    return PendingFinding("ok", f"{folder} is writable and has {size_of(free)} left")


def check_control_file(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """`kvpipe freeze` can write the file. None where there is none. The engine only reads it."""
    path = settings.control_file
    if path is None:
        return None
    remedy = "set control_file to a file in a folder that is writable for whoever runs `kvpipe freeze`"
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
    """Return the bytes that are free where `folder` is or will be made. Raises `OSError` if it cannot be written to."""
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=existing):
        return machine.free_bytes(existing)


def check_memory_pool(settings: Settings, _: HostFacts) -> PendingFinding:
    """A small pool can be allocated, and what is written to it can be read."""
    from kvpipe.transfer.pool import HostPool  # noqa: PLC0415  (imports torch)

    pool = HostPool(probe_geometry(min(PROBE_BYTES_MAX, int(settings.pool_bytes_max))))
    for slot in range(pool.slots):
        pool.slot(slot).fill_(slot % 251)
    bad = [slot for slot in range(pool.slots) if not bool((pool.slot(slot) == slot % 251).all())]
    if bad:
        detail = f"{len(bad)} of {pool.slots} slots did not hold what was written to them"
        return PendingFinding("fail", detail, "test this machine's memory")
    pages = "huge pages" if pool.huge_pages else "small pages only"
    return PendingFinding(
        "ok", f"a pool of {size_of(pool.slots * pool.slot_bytes)} was allocated, written and read ({pages})"
    )


def check_tiers(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Every tier beyond memory keeps a small value and gives it back."""
    from kvpipe.tiers.checkup import problem_of  # noqa: PLC0415  (imports their clients)
    from kvpipe.tiers.registry import named  # noqa: PLC0415

    if not settings.tiers:
        return None
    problems = {name: problem_of(name, spec) for name, spec in named(settings.tiers)}
    bad = "; ".join(f"{name}: {one_line(why)}" for name, why in problems.items() if why)
    if bad:
        return PendingFinding("warn", bad, "an engine runs without it, with fewer hits, and uses it when it is back")
    return PendingFinding("ok", f"a value was written, read and dropped: {', '.join(problems)}")


def check_first_hash(settings: Settings, machine: HostFacts) -> PendingFinding | None:
    """Engines with this environment hash blocks as the engines that have used the tiers. None without tiers."""
    from kvpipe.tiers.checkup import first_hash_in  # noqa: PLC0415  (imports their clients)
    from kvpipe.tiers.registry import named  # noqa: PLC0415

    left = {name: first_hash_in(name, spec) for name, spec in named(settings.tiers)}
    known = {name: first for name, first in left.items() if first}
    if not known:
        return None
    others = [name for name, first in known.items() if first != machine.first_hash(first.partition(" ")[0])]
    if others:
        detail = (
            f"the last engine that used {', '.join(others)} had another PYTHONHASHSEED: it shares nothing with this"
        )
        return PendingFinding("warn", detail, "set the same PYTHONHASHSEED for all engines, or for none")
    return PendingFinding("ok", f"block hashes begin as those of the last engine that used {', '.join(known)}")
