"""`kvpipe doctor`: examines the machine and what is installed on it, and says what to do.

A check is a function of the settings and of a `Machine`, which is where it gets its facts: tests put others there.
vLLM and torch are imported inside the checks that ask them, so a machine without them gets an answer too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from pydantic import ByteSize
from rich.console import Console
from rich.text import Text

from kvpipe import files, headroom
from kvpipe.config import Settings, load_settings, parse_extra
from kvpipe.control import check_control_file as check_path
from kvpipe.errors import UnsupportedError, UsageError
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.names import default_state_dir
from kvpipe.trace.setup import check_trace_file as check_trace_path

Status = Literal["ok", "warn", "fail"]

PYTHON_MIN: Final = (3, 11)
TORCH_MIN: Final = (2, 9)
POOL_SHARE_WARN: Final = 0.8  # of the free memory; the model and the engine live there too
POOL_SHARE_FAIL: Final = 1.0
STATE_FREE_BYTES_MIN: Final = 1 << 20
PROBE_BYTES_MAX: Final = 16 << 20
PIN_PROBE_BYTES_MAX: Final = 256 << 20
RESERVED_CPUS_PER_RANK: Final = 2  # vLLM's own number where there is a KV connector

_PLUGIN, _PLUGIN_GROUP = "kvpipe", "vllm.general_plugins"
_MODULE_PATH_REMEDY: Final = 'give vLLM "kv_connector_module_path": "kvpipe.connectors.vllm.connector" as well'
_SAID_CHARS_MAX: Final = 400
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Finding(NamedTuple):
    """What one check found. `remedy` is empty when `status` is ok."""

    name: str
    status: Status
    said: str
    remedy: str


class Answer(NamedTuple):
    """A finding that its check has not signed yet."""

    status: Status
    said: str
    remedy: str = ""


class Device(NamedTuple):
    """Where the engine computes: `kind` as in torch ("cuda", "cpu"), `label` for people."""

    kind: str
    label: str


class HashSeeds(NamedTuple):
    """vLLM's prefix hash algorithms: the default, and those seeded at random unless PYTHONHASHSEED is set."""

    default: str
    random: frozenset[str]


# ---- facts ----------------------------------------------------------------------------------------------------------


def _torch_version() -> str:
    import torch  # noqa: PLC0415

    return str(torch.__version__)


def _vllm_version() -> str | None:
    """Return the version of the vLLM in use, or None where there is none. Raises what its import raises."""
    if importlib.util.find_spec("vllm") is None:
        return None
    importlib.import_module("vllm")
    from kvpipe.connectors.vllm.compat import installed_version  # noqa: PLC0415

    return installed_version()


def _plugins() -> Sequence[EntryPoint]:
    return list(entry_points(group=_PLUGIN_GROUP, name=_PLUGIN))


def _connector_known() -> bool:
    """Whether vLLM's factory finds the connector's class by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    from kvpipe.connectors.vllm.plugin import NAME  # noqa: PLC0415

    try:
        return bool(KVConnectorFactory.get_connector_class_by_name(NAME).__name__ == NAME)
    except ValueError:  # not registered
        return False


def _hash_seeds() -> HashSeeds:
    """Ask vLLM for each seed twice: a random one differs."""
    from vllm.config.cache import CacheConfig, PrefixCachingHashAlgo  # noqa: PLC0415
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed as seed  # noqa: PLC0415

    functions = {name: get_hash_fn_by_name(name) for name in get_args(PrefixCachingHashAlgo)}
    random = frozenset(name for name, function in functions.items() if seed(function) != seed(function))
    return HashSeeds(str(CacheConfig.prefix_caching_hash_algo), random)


def _device() -> Device:
    """Return the device that vLLM computes on, or that torch has where there is no vLLM."""
    import torch  # noqa: PLC0415

    try:
        from vllm.platforms import current_platform  # noqa: PLC0415

        kind = str(current_platform.device_type)
    except Exception:  # noqa: BLE001  (the check of vLLM itself says what is wrong with it)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        return Device(kind, f"CUDA, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return Device(kind, kind.upper())


def _locked_bytes_max() -> int | None:
    """Return the soft limit on locked memory, None for no limit."""
    import resource  # noqa: PLC0415  (not on every system)

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _pin(size: int) -> None:
    """Pin `size` bytes of host memory and let them go. Raises `TransferError`."""
    import torch  # noqa: PLC0415

    from kvpipe.tiers.memory import HostPool  # noqa: PLC0415
    from kvpipe.transfer.device import CudaDevice  # noqa: PLC0415

    pool, device = HostPool(_probe_geometry(size)), CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    device.enter_thread()
    device.register(pool.base, pool.slots * pool.slot_bytes)
    device.unregister(pool.base)


def _cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


class Machine(NamedTuple):
    """Where the checks get their facts. `ranks`: engine ranks on this host, each with a pool of its own."""

    ranks: int = 1
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    environ: Mapping[str, str] = os.environ
    proc: Path = headroom.PROC
    cgroups: Path = headroom.CGROUPS
    cpu_topology: Path = Path("/sys/devices/system/cpu")
    torch_version: Callable[[], str] = _torch_version
    vllm_version: Callable[[], str | None] = _vllm_version
    plugins: Callable[[], Sequence[EntryPoint]] = _plugins
    connector_known: Callable[[], bool] = _connector_known
    hash_seeds: Callable[[], HashSeeds] = _hash_seeds
    device: Callable[[], Device] = _device
    locked_bytes_max: Callable[[], int | None] = _locked_bytes_max
    pin: Callable[[int], None] = _pin
    cpus: Callable[[], frozenset[int]] = _cpus
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free


# ---- what is installed ----------------------------------------------------------------------------------------------


def check_python(_: Settings, machine: Machine) -> Answer:
    """Python is new enough."""
    found = ".".join(map(str, machine.python))
    if machine.python < PYTHON_MIN:
        return Answer("fail", f"{found} is too old", f"make the environment with Python {_dotted(PYTHON_MIN)} or newer")
    return Answer("ok", found)


def check_torch(_: Settings, machine: Machine) -> Answer:
    """Torch can be imported and is new enough."""
    remedy = f"install torch {_dotted(TORCH_MIN)} or newer, in the build that vLLM was made for"
    try:
        found = machine.torch_version()
    except Exception as e:  # noqa: BLE001  (a broken library raises anything)
        return Answer("fail", f"it cannot be imported ({_one_line(e)})", remedy)
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or (int(match[1]), int(match[2])) < TORCH_MIN:
        return Answer("fail", f"{found} is too old or no release", remedy)
    return Answer("ok", found)


def check_vllm(_: Settings, machine: Machine) -> Answer:
    """VLLM can be imported and is a release whose contract is recorded."""
    from kvpipe.connectors.vllm.compat import SUPPORTED, check_version  # noqa: PLC0415

    remedy = f"install vLLM {' or '.join(map(_dotted, SUPPORTED))} into this environment"
    try:
        found = machine.vllm_version()
        if found is None:
            return Answer("fail", "it is not installed", remedy)
        check_version(found)
    except UnsupportedError as e:
        return Answer("fail", _one_line(e), remedy)
    except Exception as e:  # noqa: BLE001  (a broken library raises anything)
        return Answer("fail", f"it is installed, but cannot be imported ({_one_line(e)})", f"mend it, or {remedy}")
    return Answer("ok", found)


def check_plugin(_: Settings, machine: Machine) -> Answer:
    """The entry point is installed and loads, and vLLM then knows the connector by its name."""
    from kvpipe.connectors.vllm.plugin import NAME  # noqa: PLC0415

    plugins = machine.plugins()
    if not plugins:
        said = f"no entry point {_PLUGIN!r} of {_PLUGIN_GROUP} is installed, so vLLM does not know {NAME}"
        return Answer("fail", said, f"install kvpipe into vLLM's environment, or {_MODULE_PATH_REMEDY}")
    for plugin in plugins:
        try:
            plugin.load()()
        except Exception as e:  # noqa: BLE001  (whatever it is, vLLM would go on without the plugin)
            said = f"entry point {plugin.value} does not load ({_one_line(e)})"
            return Answer("fail", said, "mend what the error names, or install kvpipe again")
    if not machine.connector_known():
        said = f"entry point {plugins[0].value} loads, but vLLM does not know {NAME} after it"
        return Answer("fail", said, "an older kvpipe or another package holds the entry point: install kvpipe again")
    return Answer("ok", f"{plugins[0].value} loads, vLLM knows {NAME}")


def check_plugin_filter(_: Settings, machine: Machine) -> Answer:
    """VLLM_PLUGINS lets the entry point through. vLLM compares the names between commas as they are."""
    value = machine.environ.get("VLLM_PLUGINS")
    if value is None:
        return Answer("ok", "not set, every plugin is loaded")
    names = value.split(",")
    if _PLUGIN in names:
        return Answer("ok", f"{value!r} includes {_PLUGIN}")
    others = [name.strip() for name in names if name.strip() and name.strip() != _PLUGIN]
    remedy = f"set VLLM_PLUGINS={','.join([*others, _PLUGIN])} (no spaces), or {_MODULE_PATH_REMEDY}"
    return Answer("fail", f"{value!r} excludes {_PLUGIN}, so vLLM does not load it", remedy)


# ---- the device -----------------------------------------------------------------------------------------------------


def check_device(_: Settings, machine: Machine) -> Answer:
    """The engine computes on a device that has a transfer engine."""
    device = machine.device()
    if device.kind not in {"cuda", "cpu"}:
        said = f"KV caches on device {device.kind!r} are not supported by this release"
        return Answer("fail", said, "use vLLM's CUDA or CPU build")
    return Answer("ok", device.label)


def check_graphs(settings: Settings, machine: Machine) -> Answer:
    """Say which CUDA graphs the mode leads to."""
    if machine.device().kind != "cuda":
        return Answer("ok", f"mode={settings.mode}; there are no CUDA graphs without a CUDA device")
    if settings.mode == "layerwise":
        said = "mode=layerwise copies between layers: vLLM captures PIECEWISE graphs instead of full ones"
        return Answer("ok", f"{said}; mode=step keeps full graphs")
    return Answer("ok", "mode=step copies after the forward: vLLM keeps its full CUDA graphs")


def check_locked_memory(settings: Settings, machine: Machine) -> Answer:
    """The pool may be pinned. The driver decides whether the limit binds it, so it is asked with a small piece."""
    if machine.device().kind != "cuda":
        return Answer("ok", "nothing is pinned without a CUDA device")
    limit, pool = machine.locked_bytes_max(), int(settings.pool_bytes_max)
    if limit is None or limit >= pool:
        return Answer("ok", f"the limit is {'none' if limit is None else _size(limit)}, the pool {_size(pool)}")
    said = f"the limit is {_size(limit)}, less than the pool's {_size(pool)}"
    remedy = (
        f"raise it (`ulimit -l`, `docker run --ulimit memlock=-1`, systemd `LimitMEMLOCK=infinity`) to {pool} bytes, "
        "or set a smaller pool_bytes_max"
    )
    probe = min(pool, limit + PROBE_BYTES_MAX)
    if probe > PIN_PROBE_BYTES_MAX:
        return Answer("warn", f"{said}: if the driver obeys it, copies to and from the rest are slower", remedy)
    try:
        machine.pin(probe)
    except Exception as e:  # noqa: BLE001  (whatever it is, copies work without)
        why = f"{_size(probe)} could not be pinned ({_one_line(e)})"
        return Answer("warn", f"{said}, and {why}: copies are slower and block the host", remedy)
    return Answer("ok", f"{said}, but the driver pins {_size(probe)} all the same")


def check_copy_core(settings: Settings, machine: Machine) -> Answer:
    """On CPU, a core is left for copying beside those that vLLM binds its threads to."""
    if machine.device().kind != "cpu":
        return Answer("ok", "the device copies by itself")
    if settings.copy_threads == 0:
        return Answer("ok", "copy_threads=0: copies are made inside the forward")
    cpus = machine.cpus()
    spare, bind = _spare_cpus(machine, cpus), machine.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if spare > 0:
        return Answer("ok", f"{spare} of {len(cpus)} cores left for copying (VLLM_CPU_OMP_THREADS_BIND={bind})")
    effect = (
        "copies are made inside the forward" if settings.copy_threads is None else "copies compete with the forward"
    )
    said = f"no core of {len(cpus)} is left for copying (VLLM_CPU_OMP_THREADS_BIND={bind}): {effect}"
    remedy = "set copy_threads to 0 if that is meant"
    if len(cpus) > machine.ranks:
        free = ",".join(map(str, sorted(cpus)[: -machine.ranks]))
        given = free if machine.ranks == 1 else f"lists that together are {free}"
        remedy = f"leave one out for each rank, here VLLM_CPU_OMP_THREADS_BIND={given}; or {remedy}"
    return Answer("warn", said, remedy)


def _spare_cpus(machine: Machine, cpus: frozenset[int]) -> int:
    """Count the cores that vLLM's CPU build will leave free, by its rules (`vllm/utils/ompmultiprocessing.py`)."""
    bind = machine.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bind not in {"auto", "nobind"}:
        return len(cpus - frozenset(n for rank in bind.split("|") for n in _numbers(rank)))
    used = len({_core(machine, cpu) for cpu in cpus})  # one thread per physical core
    if bind == "nobind":
        return len(cpus) - int(machine.environ.get("OMP_NUM_THREADS", used))
    reserved = int(machine.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", RESERVED_CPUS_PER_RANK * machine.ranks))
    return len(cpus) - (used - reserved if used > reserved else used)  # too few to reserve any: it takes all


def _core(machine: Machine, cpu: int) -> str:
    """Return a name that the logical CPUs of one physical core share."""
    path = machine.cpu_topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)


def _numbers(text: str) -> Iterator[int]:
    """Read a list such as `0-2,5`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


# ---- hashes ---------------------------------------------------------------------------------------------------------


def check_hash_seed(settings: Settings, machine: Machine) -> Answer:
    """Engines that share or keep a cache hash blocks alike.

    vLLM seeds the hash of a prefix's first block with PYTHONHASHSEED; where that is not set, with a constant for
    sha256 and sha256_cbor, and with random bytes of the process for xxhash and xxhash_cbor.
    """
    value = machine.environ.get("PYTHONHASHSEED")
    if value is not None:
        return Answer("ok", f"PYTHONHASHSEED={value}: every process that has it hashes blocks alike")
    default, random = machine.hash_seeds()
    if default in random and settings.name:
        said = (
            f"PYTHONHASHSEED is not set and vLLM seeds {default} at random, so engines named {settings.name!r} differ"
        )
        remedy = (
            f"set one PYTHONHASHSEED for all engines named {settings.name!r}, or use --prefix-caching-hash-algo sha256"
        )
        return Answer("warn", said, remedy)
    if default in random:
        said = f"not set, and vLLM seeds {default} at random: of no matter for a cache in one engine's memory"
        return Answer("ok", f"{said}; caches that are shared or outlive a process need PYTHONHASHSEED")
    said = f"not set, not needed: {default} (vLLM's default) hashes alike in every process"
    if random:
        said += f"; a shared cache would need PYTHONHASHSEED with {' or '.join(sorted(random))}"
    return Answer("ok", said)


# ---- memory ---------------------------------------------------------------------------------------------------------


def check_memory(settings: Settings, machine: Machine) -> Answer:
    """The ranks' pools fit into what is free: the system's memory, and what the cgroups leave."""
    pool, ranks = int(settings.pool_bytes_max), machine.ranks
    rooms = [headroom.system_room(machine.proc), *headroom.cgroup_rooms(machine.proc, machine.cgroups)]
    free, _, where = min(rooms)
    share = pool * ranks / free if free > 0 else float("inf")
    pools = f"{_size(pool)}" if ranks == 1 else f"{ranks} x {_size(pool)}"
    said = f"pool_bytes_max is {pools}, {_size(max(free, 0))} are free ({where})"
    if share <= POOL_SHARE_WARN:
        fits = int(free * POOL_SHARE_WARN) // pool
        return Answer("ok", f"{said}: {share:.0%}; there is room for {fits} {'rank' if fits == 1 else 'ranks'}")
    fit = int(max(free, 0) * POOL_SHARE_WARN) // ranks >> 20
    remedy = f"set pool_bytes_max to {fit}MiB or less, or give the engine more memory" if fit else "free some memory"
    if share <= POOL_SHARE_FAIL:
        return Answer("warn", f"{said}: {share:.0%}, which leaves little for the model and the engine", remedy)
    return Answer("fail", f"{said}: the pool does not fit, and the engine would be killed as it fills", remedy)


def check_shared_memory(_: Settings, __: Machine) -> Answer:
    """Say that /dev/shm plays no part."""
    return Answer("ok", "not used: the pool is private memory of each rank, whatever the size of /dev/shm")


# ---- disk -----------------------------------------------------------------------------------------------------------


def check_state_dir(settings: Settings, machine: Machine) -> Answer:
    """A named cache can be registered, and remembered which weights are which."""
    if not settings.name and not settings.tiers and settings.state_dir is None:
        return Answer("ok", "not used without a name, or tiers")
    folder = settings.state_dir or default_state_dir()
    status: Status = "fail" if settings.name else "warn"  # without a name nothing is written
    remedy = "set state_dir to a folder that the engine's user may write to"
    try:
        free = _writable(folder, machine)
    except OSError as e:
        return Answer(status, f"{folder} is not writable ({_one_line(e)})", remedy)
    if free < STATE_FREE_BYTES_MIN:
        return Answer(status, f"{folder} has only {_size(free)} left", f"free some space, or {remedy}")
    return Answer("ok", f"{folder} is writable")


def check_otel(settings: Settings, _: Machine) -> Answer | None:
    """OpenTelemetry can be imported. None where the settings do not ask for it."""
    if not settings.otel:
        return None
    names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError as e:
        return Answer("fail", f"otel=true, and {_one_line(e)}", "pip install 'kvpipe[otel]', or set otel=false")
    return Answer("ok", "OpenTelemetry is installed; OTEL_EXPORTER_OTLP_ENDPOINT says where spans go")


def check_trace_file(settings: Settings, machine: Machine) -> Answer | None:
    """A trace can be written. None where the settings name no file for it. The engine does not make its folder."""
    path = settings.trace_file
    if path is None:
        return None
    folder = path.parent
    remedy = "set trace_file to a path in a folder that exists and that the engine's user may write to"
    try:
        if path.is_dir() or not folder.is_dir():
            said = f"{path} is a folder" if path.is_dir() else f"{folder} is not a folder that exists"
            return Answer("fail", f"{said}, so nothing would be traced", remedy)
        check_trace_path(path)
        if path.exists() and not path.is_file():
            return Answer("ok", f"{path} is a pipe or a device")
        free = _writable(folder, machine)
    except OSError as e:
        return Answer("fail", f"{folder} is not writable ({_one_line(e)}), so nothing would be traced", remedy)
    most = int(settings.trace_bytes_max)
    said, remedy = files.doubts(path), "delete it, or name another: a new one is its owner's alone"
    if free < most:
        said = f"{folder} has {_size(free)} left, a trace grows to {_size(most)}: what does not fit is lost"
        remedy = "free some space, or set a smaller trace_bytes_max"
    if said:
        return Answer("warn", said, remedy)
    return Answer("ok", f"{folder} is writable and has {_size(free)} left")


def check_control_file(settings: Settings, machine: Machine) -> Answer | None:
    """`kvpipe freeze` can write the file. None where there is none. The engine only reads it."""
    path = settings.control_file
    if path is None:
        return None
    remedy = "set control_file to a file in a folder that is writable for whoever runs `kvpipe freeze`"
    try:
        if path.is_dir():
            return Answer("fail", f"{path} is a folder, so no engine can read it as a file", remedy)
        check_path(path)
        _writable(path.parent, machine)
    except OSError as e:
        said = (
            f"{path.parent} is not writable for this user ({_one_line(e)}), so `kvpipe freeze` will not work from here"
        )
        return Answer("warn", said, remedy)
    return Answer("ok", f"{path.parent} is writable")


def _writable(folder: Path, machine: Machine) -> int:
    """Return the bytes that are free where `folder` is or will be made. Raises `OSError` if it cannot be written to."""
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=existing):
        return machine.free_bytes(existing)


# ---- tiers ----------------------------------------------------------------------------------------------------------


def check_memory_tier(settings: Settings, _: Machine) -> Answer:
    """A small pool can be allocated, and what is written to it can be read."""
    from kvpipe.tiers.memory import HostPool  # noqa: PLC0415  (imports torch)

    pool = HostPool(_probe_geometry(min(PROBE_BYTES_MAX, int(settings.pool_bytes_max))))
    for slot in range(pool.slots):
        pool.slot(slot).fill_(slot % 251)
    bad = [slot for slot in range(pool.slots) if not bool((pool.slot(slot) == slot % 251).all())]
    if bad:
        said = f"{len(bad)} of {pool.slots} slots did not hold what was written to them"
        return Answer("fail", said, "test this machine's memory")
    pages = "huge pages" if pool.huge_pages else "small pages only"
    return Answer("ok", f"a pool of {_size(pool.slots * pool.slot_bytes)} was allocated, written and read ({pages})")


def check_tiers(settings: Settings, _: Machine) -> Answer | None:
    """Every tier beyond memory keeps a small value and gives it back."""
    from kvpipe.tiers.checkup import problem_of  # noqa: PLC0415  (imports their clients)
    from kvpipe.tiers.registry import named  # noqa: PLC0415

    if not settings.tiers:
        return None
    problems = {name: problem_of(name, spec) for name, spec in named(settings.tiers)}
    bad = "; ".join(f"{name}: {_one_line(why)}" for name, why in problems.items() if why)
    if bad:
        return Answer("warn", bad, "an engine runs without it, with fewer hits, and uses it when it is back")
    return Answer("ok", f"a value was written, read and dropped: {', '.join(problems)}")


def _probe_geometry(size: int) -> Geometry:
    """A pool of `size` bytes in slots of at most 1 MiB. Raises `ConfigError` where that is less than one page."""
    return Geometry((Group((Layer("probe", min(size, 1 << 20)),), 1),), chunk_tokens=1, pool_bytes_max=size)


# ---- all of them ----------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One check. `ask` returns None where there is nothing to check; `if_raised` is the status when it raises."""

    name: str
    ask: Callable[[Settings, Machine], Answer | None]
    if_raised: Status


TIERS: list[Check] = [Check("memory tier", check_memory_tier, "fail"), Check("tiers", check_tiers, "fail")]
"""One check for each tier that chunks are kept in."""

CHECKS: list[Check] = [
    Check("python", check_python, "fail"),
    Check("torch", check_torch, "fail"),
    Check("vllm", check_vllm, "fail"),
    Check("plugin", check_plugin, "fail"),
    Check("VLLM_PLUGINS", check_plugin_filter, "fail"),
    Check("device", check_device, "fail"),
    Check("cuda graphs", check_graphs, "warn"),
    Check("hash seed", check_hash_seed, "warn"),
    Check("locked memory", check_locked_memory, "warn"),
    Check("free memory", check_memory, "warn"),
    Check("shared memory", check_shared_memory, "warn"),
    Check("copy core", check_copy_core, "warn"),
    Check("state_dir", check_state_dir, "warn"),
    Check("trace_file", check_trace_file, "warn"),
    Check("control_file", check_control_file, "warn"),
    Check("otel", check_otel, "fail"),
]


def examine(settings: Settings, machine: Machine | None = None) -> list[Finding]:
    """Run every check. Nothing raises: a check that does is a finding."""
    facts = machine or Machine()
    findings = []
    for check in (*CHECKS, *TIERS):
        try:
            answer = check.ask(settings, facts)
        except UsageError as e:  # its sentence names the remedy
            answer = Answer(check.if_raised, _one_line(e), "change the configuration as it says")
        except Exception as e:  # noqa: BLE001  (see above)
            said = f"could not be checked ({type(e).__name__}: {_one_line(e)})"
            answer = Answer(check.if_raised, said, "mend what failed before it, then run this again")
        if answer is not None:
            findings.append(Finding(check.name, *answer))
    return findings


def examine_extra(extra: str, *, ranks: int = 1) -> list[Finding]:
    """Check the configuration too, given as JSON. With a wrong one, everything else is checked with the defaults."""
    try:
        settings = load_settings(parse_extra(extra))
        given = ", ".join(f"{key}={getattr(settings, key)}" for key in sorted(settings.model_fields_set))
        first = Finding("configuration", "ok", f"valid ({given})" if given else "valid (all defaults)", "")
    except Exception as e:  # noqa: BLE001  (whatever it is, the checks go on)
        settings = Settings.model_construct()  # the environment may be what is wrong, so it is not read
        said = _one_line(e) if isinstance(e, UsageError) else f"{type(e).__name__}: {_one_line(e)}"
        remedy = "change the configuration as it says; the other checks were made with the defaults"
        first = Finding("configuration", "fail", said, remedy)
    return [first, *examine(settings, Machine(ranks=ranks))]


def verdict(findings: Sequence[Finding]) -> str:
    """Sum up in one sentence."""
    failed, warned = (sum(f.status == status for f in findings) for status in ("fail", "warn"))
    warnings = f"{warned} {'warning' if warned == 1 else 'warnings'}"
    if failed:
        tail = f" and there {'is' if warned == 1 else 'are'} {warnings}" if warned else ""
        return f"kvpipe will not work here as it is: {failed} of {len(findings)} checks failed{tail}."
    if warned:
        return f"kvpipe works here, with {warnings}."
    return "kvpipe works here."


def main(extra: str, *, as_json: bool, ranks: int = 1) -> int:
    """Print what was found, and a verdict. Return 1 when a check failed, else 0.

    Args:
        extra: kv_connector_extra_config as JSON.
        as_json: print one JSON object instead of lines.
        ranks: engine ranks on this host, each with a pool of its own.

    """
    with _quiet(), redirect_stdout(sys.stderr):  # vLLM logs to stdout, which is for the findings
        findings = examine_extra(extra, ranks=ranks)
    status = max((f.status for f in findings), key=("ok", "warn", "fail").index)
    if as_json:
        result = {"status": status, "verdict": verdict(findings), "findings": [f._asdict() for f in findings]}
        print(json.dumps(result, indent=2))  # noqa: T201
    else:
        _show(findings)
    return int(status == "fail")


def _show(findings: Sequence[Finding]) -> None:
    """Print a line per finding, its remedy below it. Lines are not wrapped, so that a pipe sees them whole."""
    console = Console(highlight=False)
    width = max(len(f.name) for f in findings)
    for f in findings:
        line = Text.assemble((f"{f.status:<4}", _STYLES[f.status]), f"  {f.name:<{width}}  {_one_line(f.said)}")
        console.print(line, soft_wrap=True)
        if f.status != "ok":
            console.print(Text(f"{'':<6}{'':<{width}}  -> {_one_line(f.remedy)}"), soft_wrap=True)
    console.print(Text(verdict(findings), style="bold"), soft_wrap=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let vLLM log errors only, unless its level was set."""
    key = "VLLM_LOGGING_LEVEL"
    if key in os.environ:
        yield
        return
    os.environ[key] = "ERROR"
    try:
        yield
    finally:
        del os.environ[key]


def _one_line(text: object) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= _SAID_CHARS_MAX else flat[: _SAID_CHARS_MAX - 3] + "..."


def _size(size: int) -> str:
    return ByteSize(size).human_readable()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
