"""What `kvpipe doctor` says of a machine, from facts that are given to it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpipe import doctor
from kvpipe.config import Settings, load_settings
from kvpipe.doctor import Answer, Check, Device, Finding, HashSeeds, Machine, examine
from kvpipe.tiers.envelope import DamagedError

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CUDA, CPU = Device("cuda", "CUDA, 1 x GPU"), Device("cpu", "CPU")
LOADS = EntryPoint("kvpipe", "builtins:dict", "vllm.general_plugins")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)


def _unasked(*_: object) -> Any:
    pytest.fail("a fact that this check does not need was asked for")


def _machine(tmp_path: Path, **facts: Any) -> Machine:
    """A machine of `facts` only: what is not given is absent, or must not be asked for."""
    made = Machine(
        environ={},
        proc=tmp_path / "proc",
        cgroups=tmp_path / "cgroup",
        cpu_topology=tmp_path / "cpu",
        torch_version=_unasked,
        vllm_version=_unasked,
        plugins=_unasked,
        connector_known=_unasked,
        hash_seeds=_unasked,
        device=_unasked,
        locked_bytes_max=_unasked,
        pin=_unasked,
        cpus=_unasked,
        free_bytes=_unasked,
    )
    return made._replace(**facts)


def _raising(error: Exception) -> Any:
    def fact(*_: object, **__: object) -> Any:
        raise error

    return fact


def _broken(tmp_path: Path) -> Machine:
    """A machine where every question fails."""
    facts = {name: _raising(OSError("no")) for name, value in Machine()._asdict().items() if callable(value)}
    return _machine(tmp_path, **facts)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _known(answer: Answer | None) -> Answer:
    assert answer is not None
    assert bool(answer.remedy) == (answer.status != "ok")
    return answer


# ---- what is installed ----------------------------------------------------------------------------------------------


def test_python(tmp_path: Path) -> None:
    """The version that the package asks for is the first that is good enough."""
    assert doctor.check_python(load_settings(), _machine(tmp_path, python=(3, 11, 0))) == ("ok", "3.11.0", "")
    old = _known(doctor.check_python(load_settings(), _machine(tmp_path, python=(3, 10, 14))))
    assert (old.status, old.said) == ("fail", "3.10.14 is too old")
    assert "3.11 or newer" in old.remedy


def test_the_least_versions_are_the_packages() -> None:
    """`pyproject.toml` asks for the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">={}.{}".format(*doctor.PYTHON_MIN)
    assert "torch>={}.{}".format(*doctor.TORCH_MIN) in project["dependencies"]


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.9.0", "ok", "2.9.0"),
        ("2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("2.8.1+cu126", "fail", "2.8.1+cu126 is too old or no release"),
        ("main", "fail", "main is too old or no release"),
    ],
)
def test_torch(tmp_path: Path, version: str, status: str, said: str) -> None:
    """Versions are compared as numbers."""
    answer = _known(doctor.check_torch(load_settings(), _machine(tmp_path, torch_version=lambda: version)))
    assert (answer.status, answer.said) == (status, said)


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """A broken library is a finding with the error in one line."""
    machine = _machine(tmp_path, torch_version=_raising(OSError("libgomp:\n  not found")))
    answer = _known(doctor.check_torch(load_settings(), machine))
    assert (answer.status, answer.said) == ("fail", "it cannot be imported (libgomp: not found)")
    assert "install torch 2.9 or newer" in answer.remedy


@pytest.mark.parametrize(
    ("fact", "status", "said"),
    [
        (lambda: "0.32.0", "ok", "0.32.0"),
        (lambda: "0.33.1", "ok", "0.33.1"),
        (lambda: "0.31.2", "fail", "vLLM 0.31.2 is not supported"),
        (lambda: None, "fail", "it is not installed"),
        (_raising(RuntimeError("bad build")), "fail", "installed, but cannot be imported (bad build)"),
    ],
)
def test_vllm(tmp_path: Path, fact: Any, status: str, said: str) -> None:
    """Absent, broken and unsupported are told apart; the remedy names the releases."""
    answer = _known(doctor.check_vllm(load_settings(), _machine(tmp_path, vllm_version=fact)))
    assert answer.status == status
    assert said in answer.said
    assert status == "ok" or "install vLLM 0.32 or 0.33" in answer.remedy


@pytest.mark.parametrize(
    ("plugins", "known", "status", "said"),
    [
        ([LOADS], True, "ok", "builtins:dict loads, vLLM knows KVPipeConnector"),
        ([LOADS], False, "fail", "vLLM does not know KVPipeConnector after it"),
        ([], True, "fail", "no entry point 'kvpipe' of vllm.general_plugins is installed"),
        ([EntryPoint("kvpipe", "kvpipe.absent:register", "g")], True, "fail", "kvpipe.absent:register does not load"),
        ([EntryPoint("kvpipe", "operator:neg", "g")], True, "fail", "operator:neg does not load"),
        ([LOADS, EntryPoint("kvpipe", "kvpipe.absent:register", "g")], True, "fail", "kvpipe.absent:register does not"),
    ],
)
def test_plugin(tmp_path: Path, plugins: list[EntryPoint], known: bool, status: str, said: str) -> None:
    """The entry point is installed, loads, can be called, and leads to the connector."""
    machine = _machine(tmp_path, plugins=lambda: plugins, connector_known=lambda: known)
    answer = _known(doctor.check_plugin(load_settings(), machine))
    assert answer.status == status
    assert said in answer.said


@pytest.mark.parametrize(
    ("value", "status", "remedy"),
    [
        (None, "ok", ""),
        ("kvpipe", "ok", ""),
        ("other,kvpipe", "ok", ""),
        ("", "fail", "set VLLM_PLUGINS=kvpipe "),
        ("other", "fail", "set VLLM_PLUGINS=other,kvpipe "),
        ("other, kvpipe", "fail", "set VLLM_PLUGINS=other,kvpipe "),
    ],
)
def test_plugin_filter(tmp_path: Path, value: str | None, status: str, remedy: str) -> None:
    """Names count only as vLLM reads them, spaces and all; the remedy keeps what was there."""
    environ = {} if value is None else {"VLLM_PLUGINS": value}
    answer = _known(doctor.check_plugin_filter(load_settings(), _machine(tmp_path, environ=environ)))
    assert answer.status == status
    assert remedy in answer.remedy


# ---- the device -----------------------------------------------------------------------------------------------------


def test_device(tmp_path: Path) -> None:
    """CUDA and CPU are served, nothing else."""
    for device in (CUDA, CPU):
        machine = _machine(tmp_path, device=lambda device=device: device)
        assert doctor.check_device(load_settings(), machine) == ("ok", device.label, "")
    other = _known(doctor.check_device(load_settings(), _machine(tmp_path, device=lambda: Device("xpu", "XPU"))))
    assert other.status == "fail"
    assert "'xpu'" in other.said


@pytest.mark.parametrize(
    ("device", "mode", "said"),
    [
        (CUDA, "layerwise", "captures PIECEWISE graphs instead of full ones; mode=step keeps full graphs"),
        (CUDA, "step", "keeps its full CUDA graphs"),
        (CPU, "layerwise", "mode=layerwise; there are no CUDA graphs"),
    ],
)
def test_graphs(tmp_path: Path, device: Device, mode: str, said: str) -> None:
    """The mode decides which graphs a CUDA device gets."""
    answer = _known(doctor.check_graphs(load_settings({"mode": mode}), _machine(tmp_path, device=lambda: device)))
    assert answer.status == "ok"
    assert said in answer.said


@pytest.mark.parametrize(
    ("limit", "pins", "status", "said"),
    [
        (None, None, "ok", "the limit is none"),
        (GIB, None, "ok", "the limit is 1.0GiB, the pool 1.0GiB"),
        (8 << 20, True, "ok", "but the driver pins 24.0MiB all the same"),
        (8 << 20, False, "warn", "24.0MiB could not be pinned (CUDA error 2)"),
        (GIB - 1, None, "warn", "if the driver obeys it"),
    ],
)
def test_locked_memory(tmp_path: Path, limit: int | None, pins: bool | None, status: str, said: str) -> None:
    """A limit below the pool is put to the test with a piece just above it, unless that is too large a piece."""
    asked: list[int] = []
    pin = {None: _unasked, True: asked.append, False: _raising(RuntimeError("CUDA error 2"))}[pins]
    machine = _machine(tmp_path, device=lambda: CUDA, locked_bytes_max=lambda: limit, pin=pin)
    answer = _known(doctor.check_locked_memory(load_settings({"pool_bytes_max": GIB}), machine))
    assert answer.status == status
    assert said in answer.said
    assert asked == ([24 << 20] if pins else [])
    assert status == "ok" or f"to {GIB} bytes" in answer.remedy


def test_locked_memory_is_the_systems_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit counts, and no limit is none. Without a CUDA device it does not matter."""
    for soft, most in ((65_536, 65_536), (resource.RLIM_INFINITY, None)):
        limits = {resource.RLIMIT_MEMLOCK: (soft, resource.RLIM_INFINITY)}
        monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
        assert Machine().locked_bytes_max() == most
    answer = doctor.check_locked_memory(load_settings(), _machine(tmp_path, device=lambda: CPU))
    assert answer == ("ok", "nothing is pinned without a CUDA device", "")


@pytest.mark.parametrize(
    ("environ", "cpus", "siblings", "ranks", "spare"),
    [
        ({}, 8, 1, 1, 2),  # vLLM reserves two per rank
        ({}, 8, 2, 1, 6),  # it uses one thread per core: four cores less two
        ({}, 8, 1, 2, 4),
        ({}, 2, 1, 1, 0),  # too few to reserve any
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, 2, 1, 1, 1),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, 8, 1, 1, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-6"}, 8, 1, 1, 1),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3|4,5-7"}, 8, 1, 2, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 8, 1, 1, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "5"}, 8, 1, 1, 3),
    ],
)
def test_copy_core(tmp_path: Path, environ: dict[str, str], cpus: int, siblings: int, ranks: int, spare: int) -> None:
    """What vLLM's binding leaves is what kvpipe's threads get."""
    for cpu in range(cpus) if siblings > 1 else ():
        _write(tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu // siblings}\n")
    machine = _machine(tmp_path, device=lambda: CPU, environ=environ, ranks=ranks, cpus=lambda: frozenset(range(cpus)))
    answer = _known(doctor.check_copy_core(load_settings(), machine))
    if spare:
        assert answer.status == "ok"
        assert answer.said.startswith(f"{spare} of {cpus} cores left")
    else:
        assert answer.status == "warn"
        assert f"no core of {cpus} is left" in answer.said


def test_copy_core_remedies(tmp_path: Path) -> None:
    """The remedy names cores that this machine has; a choice that was made is no warning."""
    machine = _machine(tmp_path, device=lambda: CPU, cpus=lambda: frozenset({4, 6}))
    answer = _known(doctor.check_copy_core(load_settings(), machine))
    assert "VLLM_CPU_OMP_THREADS_BIND=4;" in answer.remedy
    assert "inside the forward" in answer.said
    answer = _known(doctor.check_copy_core(load_settings({"copy_threads": 1}), machine))
    assert (answer.status, "compete with the forward" in answer.said) == ("warn", True)
    answer = _known(doctor.check_copy_core(load_settings(), machine._replace(cpus=lambda: frozenset({4}))))
    assert answer.remedy == "set copy_threads to 0 if that is meant"
    assert _known(doctor.check_copy_core(load_settings({"copy_threads": 0}), machine)).status == "ok"
    assert _known(doctor.check_copy_core(load_settings(), _machine(tmp_path, device=lambda: CUDA))).status == "ok"


# ---- hashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "default", "name", "status", "said"),
    [
        ("0", None, "docs", "ok", "PYTHONHASHSEED=0"),
        ("", None, "docs", "ok", "PYTHONHASHSEED="),  # vLLM takes this too as a seed
        (None, "sha256", "docs", "ok", "sha256 (vLLM's default) hashes alike in every process"),
        (None, "sha256", "", "ok", "a shared cache would need PYTHONHASHSEED with xxhash"),
        (None, "xxhash", "", "ok", "of no matter for a cache in one engine's memory"),
        (None, "xxhash", "docs", "warn", "vLLM seeds xxhash at random, so engines named 'docs' differ"),
    ],
)
def test_hash_seed(tmp_path: Path, seed: str | None, default: str | None, name: str, status: str, said: str) -> None:
    """A random seed matters to engines that share a name."""
    environ = {} if seed is None else {"PYTHONHASHSEED": seed}
    seeds = _unasked if default is None else (lambda: HashSeeds(default, frozenset({"xxhash"})))
    answer = _known(
        doctor.check_hash_seed(load_settings({"name": name}), _machine(tmp_path, environ=environ, hash_seeds=seeds))
    )
    assert answer.status == status
    assert said in answer.said
    assert status == "ok" or "PYTHONHASHSEED" in answer.remedy


# ---- memory ---------------------------------------------------------------------------------------------------------


def _memory(tmp_path: Path, available: int, ranks: int = 1, pool: int = 4 * GIB) -> Answer:
    _write(tmp_path / "proc" / "meminfo", f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:  {available >> 10} kB\n")
    machine = _machine(tmp_path, ranks=ranks)
    return _known(doctor.check_memory(load_settings({"pool_bytes_max": pool}), machine))


@pytest.mark.parametrize(
    ("available", "ranks", "status"),
    [
        (5 * GIB, 1, "ok"),  # 80 %
        (5 * GIB - 1024, 1, "warn"),
        (4 * GIB, 1, "warn"),  # 100 %
        (4 * GIB - 1024, 1, "fail"),
        (10 * GIB, 2, "ok"),
        (9 * GIB, 2, "warn"),
        (7 * GIB, 2, "fail"),
        (0, 1, "fail"),
    ],
)
def test_memory(tmp_path: Path, available: int, ranks: int, status: str) -> None:
    """Above 80 % of what is free is a warning, above 100 % a failure, for all ranks together."""
    assert _memory(tmp_path, available, ranks).status == status


def test_memory_sentences(tmp_path: Path) -> None:
    """Sizes, where the limit comes from, and a size that would do."""
    assert _memory(tmp_path, 20 * GIB) == (
        "ok",
        "pool_bytes_max is 4.0GiB, 20.0GiB are free (MemAvailable): 20%; there is room for 4 ranks",
        "",
    )
    two = _memory(tmp_path, 5 * GIB, ranks=2)
    assert two.said.startswith("pool_bytes_max is 2 x 4.0GiB, 5.0GiB are free (MemAvailable): the pool does not fit")
    assert two.remedy.startswith("set pool_bytes_max to 2048MiB or less")
    assert _memory(tmp_path, 5 * GIB, ranks=2, pool=2048 << 20).status == "ok"  # the remedy helps
    assert _memory(tmp_path, 0).remedy == "free some memory"


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "a/b", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),  # a limit above counts
        ("0::/../x", "", ("memory.max", "memory.current", "inactive_file")),
        ("1:cpu:/\n4:memory:/a", "memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("4:memory:/host/a", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_memory_in_a_cgroup(tmp_path: Path, group: str, folder: str, names: tuple[str, str, str]) -> None:
    """The limit less what is used counts, where it is less than what the system has; idle file pages are free."""
    limit, usage, idle = names
    _write(tmp_path / "proc" / "self" / "cgroup", group + "\n")
    _write(tmp_path / "x" / limit, "1\n")  # not of this namespace
    _write(tmp_path / "x" / usage, "0\n")
    _write(tmp_path / "x" / "memory.stat", "")
    where = tmp_path / "cgroup" / folder
    _write(where / limit, f"{8 * GIB}\n")
    _write(where / usage, f"{5 * GIB}\n")
    _write(where / "memory.stat", f"anon 1\n{idle} {2 * GIB}\n")
    assert _memory(tmp_path, 100 * GIB, pool=4 * GIB).said.startswith(
        "pool_bytes_max is 4.0GiB, 5.0GiB are free (cgroup limit 8.0GiB): 80%"
    )
    assert "(MemAvailable)" in _memory(tmp_path, 4 * GIB, pool=GIB).said
    _write(where / usage, f"{11 * GIB}\n")  # nothing is left
    assert _memory(tmp_path, 100 * GIB).status == "fail"
    _write(where / limit, "max\n" if limit == "memory.max" else f"{(1 << 63) - 4096}\n")
    assert "(MemAvailable)" in _memory(tmp_path, 100 * GIB).said


def test_memory_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    """Systems without /proc are not refused."""
    found = {f.name: f for f in examine(load_settings(), _broken(tmp_path))}
    assert found["free memory"].status == "warn"
    assert "meminfo" in found["free memory"].said


def test_shared_memory(tmp_path: Path) -> None:
    """There is nothing to do about /dev/shm, and nothing of kvpipe opens it."""
    answer = doctor.check_shared_memory(load_settings(), _machine(tmp_path))
    assert (answer.status, "not used" in answer.said) == ("ok", True)
    sources = [p for p in (ROOT / "kvpipe").rglob("*.py") if p.name != "doctor.py"]
    assert not [p for p in sources if re.search(r"dev.shm|shared_memory|shm_open", p.read_text(encoding="utf-8"))]


# ---- disk -----------------------------------------------------------------------------------------------------------


def _free(size: int) -> Any:
    return lambda _: size


def test_state_dir(tmp_path: Path) -> None:
    """The folder is needed for a name only; one that cannot be made there is a failure."""
    unused = ("ok", "not used without a name, or tiers", "")
    assert doctor.check_state_dir(load_settings(), _machine(tmp_path)) == unused
    good, bad = tmp_path / "to" / "be" / "made", tmp_path / "file" / "folder"
    bad.parent.write_text("", encoding="utf-8")
    machine = _machine(tmp_path, free_bytes=_free(GIB))
    cases: list[tuple[dict[str, Any], Machine, str, str]] = [
        ({"name": "docs", "state_dir": good}, machine, "ok", f"{good} is writable"),
        ({"name": "docs", "state_dir": bad}, machine, "fail", f"{bad} is not writable"),
        ({"state_dir": bad}, machine, "warn", f"{bad} is not writable"),
        ({"name": "docs", "state_dir": good}, machine._replace(free_bytes=_free(4096)), "fail", "only 4.0KiB left"),
    ]
    for extra, on, status, said in cases:
        answer = _known(doctor.check_state_dir(load_settings(extra), on))
        assert (answer.status, said in answer.said) == (status, True), answer
    assert not good.parent.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]  # nothing is left behind


def test_the_default_state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a folder is registered where `kvpipe.names` says."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    answer = doctor.check_state_dir(load_settings({"name": "docs"}), _machine(tmp_path, free_bytes=_free(GIB)))
    assert answer == ("ok", f"{tmp_path / 'state' / 'kvpipe'} is writable", "")


def test_a_folder_that_refuses_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system answers to an attempt counts, not the permission bits: root passes those."""
    monkeypatch.setattr("tempfile.TemporaryFile", _raising(OSError(30, "Read-only file system")))
    settings = load_settings({"name": "docs", "state_dir": tmp_path})
    traced = cast("Settings", SimpleNamespace(trace_file=tmp_path / "trace.jsonl"))
    for answer in (
        doctor.check_state_dir(settings, _machine(tmp_path)),
        doctor.check_trace_file(traced, _machine(tmp_path)),
    ):
        known = _known(answer)
        assert (known.status, "Read-only file system" in known.said) == ("fail", True)


def test_otel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it must be there."""
    assert doctor.check_otel(load_settings({}), _machine(tmp_path)) is None
    asked = load_settings({"otel": True})
    assert _known(doctor.check_otel(asked, _machine(tmp_path))).status == "ok"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    missing = _known(doctor.check_otel(asked, _machine(tmp_path)))
    assert (missing.status, missing.remedy) == ("fail", "pip install 'kvpipe[otel]', or set otel=false")


def test_trace_file(tmp_path: Path) -> None:
    """Only a file that is named is checked; its folder must be there; a trace wants room."""

    def ask(path: Path | None, free: int = 2 * GIB, **others: int) -> Answer | None:
        settings = cast("Settings", SimpleNamespace(trace_file=path, **{"trace_bytes_max": 1 << 30} | others))
        return doctor.check_trace_file(settings, _machine(tmp_path, free_bytes=_free(free)))

    path = tmp_path / "trace.jsonl"
    assert ask(None) is None
    assert doctor.check_trace_file(load_settings({}), _machine(tmp_path)) is None
    assert _known(ask(path)) == ("ok", f"{tmp_path} is writable and has 2.0GiB left", "")
    assert _known(ask(path, GIB)).status == "ok"
    tight = _known(ask(path, GIB - 1))
    assert (tight.status, "a trace grows to 1.0GiB" in tight.said) == ("warn", True)
    assert _known(ask(path, 4096, trace_bytes_max=4096)).status == "ok"
    assert _known(ask(path, 4095, trace_bytes_max=4096)).status == "warn"
    assert _known(ask(tmp_path)).said.startswith(f"{tmp_path} is a folder")
    absent = _known(ask(tmp_path / "absent" / "trace.jsonl"))
    assert (absent.status, "is not a folder that exists" in absent.said) == ("fail", True)
    os.mkfifo(path)
    assert _known(ask(path, 0)) == ("ok", f"{path} is a pipe or a device", "")


def test_control_file(tmp_path: Path) -> None:
    """The engine only reads it, so a folder that cannot be written to from here is a warning."""

    def ask(path: Path | None) -> Answer | None:
        settings = load_settings({"control_file": path})
        return doctor.check_control_file(settings, _machine(tmp_path, free_bytes=_free(0)))

    assert ask(None) is None
    assert _known(ask(tmp_path / "new" / "control")).status == "ok"
    assert not (tmp_path / "new").exists()
    assert _known(ask(tmp_path)).status == "fail"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert _known(ask(tmp_path / "file" / "control")).status == "warn"


# ---- tiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "probe"), [("4GiB", "16.0MiB"), ("3MiB", "3.0MiB"), (8192, "8.0KiB")])
def test_memory_tier(tmp_path: Path, pool: str | int, probe: str) -> None:
    """A small pool of the project's own is used, never the whole."""
    answer = _known(doctor.check_memory_tier(load_settings({"pool_bytes_max": pool}), _machine(tmp_path)))
    assert answer.status == "ok"
    assert answer.said.startswith(f"a pool of {probe} was allocated, written and read")


def test_memory_tier_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is refused, that forgets, or that is less than a page."""

    def found(extra: dict[str, Any] | None = None) -> Finding:
        return next(f for f in examine(load_settings(extra), _broken(tmp_path)) if f.name == "memory tier")

    small = found({"pool_bytes_max": 100})
    assert (small.status, "pool_bytes_max=100 holds not even one chunk" in small.said) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr("kvpipe.tiers.memory.mmap.mmap", _raising(OSError(12, "Cannot allocate memory")))
        refused = found()
    assert (refused.status, "Cannot allocate memory" in refused.said) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr("kvpipe.tiers.memory.HostPool.slot", lambda pool, index: pool.tensor[index].clone())
        forgets = found()
    assert (forgets.status, forgets.said) == ("fail", "15 of 16 slots did not hold what was written to them")


def test_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that works is said to; one that is down is named, with the reason; none is no finding."""

    def found(*tiers: object) -> Answer | None:
        return doctor.check_tiers(load_settings({"tiers": list(tiers)}), _machine(tmp_path))

    assert found() is None
    disk = {"kind": "disk", "path": str(tmp_path / "kv")}
    answer = _known(found(disk))
    assert (answer.status, answer.said) == ("ok", "a value was written, read and dropped: disk")
    assert not list((tmp_path / "kv").rglob("*-g0-*"))
    answer = _known(found({"kind": "redis", "host": "127.0.0.1", "port": 1}, disk))
    assert answer.status == "warn"
    assert answer.said.startswith("redis: ")
    assert "disk" not in answer.said
    monkeypatch.setattr("kvpipe.tiers.envelope.Sealer.unseal", _raising(DamagedError("checksum")))
    assert _known(found(disk)).said == "disk: a value came back damaged (checksum)"


# ---- all of them ----------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, with the status it names, in one line; the tiers come last, and any can be added."""
    monkeypatch.setattr(doctor, "CHECKS", [Check("one", _raising(KeyError("a\nb")), "warn")])
    monkeypatch.setattr(doctor, "TIERS", [*doctor.TIERS, Check("store", _raising(OSError("x" * 9999)), "fail")])
    first, memory, store = examine(load_settings(), _machine(tmp_path))
    assert first[:3] == ("one", "warn", r"could not be checked (KeyError: 'a\nb')")
    assert first.remedy
    assert memory[:2] == ("memory tier", "ok")
    assert store[:2] == ("store", "fail")
    assert len(store.said) < 500


def test_nothing_known_is_no_traceback(tmp_path: Path) -> None:
    """On a machine where every question fails, every check has an answer."""
    found = examine(load_settings({"name": "docs"}), _broken(tmp_path))
    assert {f.name for f in found} == {c.name for c in (*doctor.CHECKS, *doctor.TIERS)} - {
        "trace_file",
        "control_file",
        "otel",
        "tiers",
    }
    assert all(f.remedy for f in found if f.status != "ok")
    assert {f.name for f in found if f.status == "ok"} == {"python", "VLLM_PLUGINS", "shared memory", "memory tier"}


FINDINGS = {
    "ok": Finding("torch", "ok", "2.13.0", ""),
    "warn": Finding("copy core", "warn", "no core [0] is\nleft", "leave one"),
    "fail": Finding("vllm", "fail", "it is not installed " + "x" * 200, "install it"),
}


def _run(monkeypatch: pytest.MonkeyPatch, extra: str, *found: str, as_json: bool = False) -> int:
    """Run the command on a machine where this is found, beside the configuration."""

    def fake(_: Settings, __: Machine) -> list[Finding]:
        print("noise of an engine")
        return [FINDINGS[one] for one in found]

    monkeypatch.setattr(doctor, "examine", fake)
    return doctor.main(extra, as_json=as_json)


@pytest.mark.parametrize(
    ("found", "status", "last"),
    [
        (["ok"], 0, "kvpipe works here."),
        (["ok", "warn"], 0, "kvpipe works here, with 1 warning."),
        (["warn", "warn"], 0, "kvpipe works here, with 2 warnings."),
        (["ok", "fail"], 1, "kvpipe will not work here as it is: 1 of 3 checks failed."),
        (
            ["warn", "fail", "fail"],
            1,
            "kvpipe will not work here as it is: 2 of 4 checks failed and there is 1 warning.",
        ),
    ],
)
def test_verdict_and_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[str], status: int, last: str
) -> None:
    """Warnings are allowed, failures are not."""
    assert _run(monkeypatch, "{}", *found) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_output_is_a_line_per_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Remedies are indented below; long lines stay whole in a pipe; what others print is not among them."""
    monkeypatch.setenv("COLUMNS", "40")
    _run(monkeypatch, '{"chunk_tokens": 512}', "ok", "warn", "fail")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "ok    configuration  valid (chunk_tokens=512)",
        "ok    torch          2.13.0",
        "warn  copy core      no core [0] is left",
        "                     -> leave one",
        "fail  vllm           it is not installed " + "x" * 200,
        "                     -> install it",
        "kvpipe will not work here as it is: 1 of 4 checks failed and there is 1 warning.",
    ]
    assert "noise of an engine" in err


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One object: the worst status, the verdict and every finding."""
    assert _run(monkeypatch, "{}", "warn", "fail", as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "status": "fail",
        "verdict": "kvpipe will not work here as it is: 1 of 3 checks failed and there is 1 warning.",
        "findings": [
            {"name": "configuration", "status": "ok", "said": "valid (all defaults)", "remedy": ""},
            *({**FINDINGS[one]._asdict()} for one in ("warn", "fail")),
        ],
    }
    assert _run(monkeypatch, "{}", "warn", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "warn"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('{"chunk_sizee": 4}', "kvpipe: unknown key 'chunk_sizee' in the kv_connector_extra_config; did you mean"),
        ('{"chunk_tokens": 0}', "kvpipe: chunk_tokens=0 is not valid"),
        ("{", "kvpipe: extra is not JSON ("),
        ("[1]", "kvpipe: extra is no JSON object but of type list"),
    ],
)
def test_a_wrong_configuration_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: str, said: str
) -> None:
    """It fails with its own sentence, and the other checks are still made."""
    assert _run(monkeypatch, extra, "ok", as_json=True) == 1
    first, second = json.loads(capsys.readouterr().out)["findings"]
    assert (first["name"], first["status"], first["said"].startswith(said)) == ("configuration", "fail", True), first
    assert "defaults" in first["remedy"]
    assert second["name"] == "torch"


def test_a_wrong_environment_leaves_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checks are made with the table's defaults and with the ranks that were asked for."""
    asked: list[tuple[Settings, Machine]] = []

    def fake(*args: Any) -> list[Finding]:
        asked.append(args)
        return []

    monkeypatch.setattr(doctor, "examine", fake)
    monkeypatch.setenv("KVPIPE_MODE", "wrong")
    monkeypatch.setenv("KVPIPE_NAME", "docs")
    assert [f.status for f in doctor.examine_extra("{}", ranks=3)] == ["fail"]
    ((settings, machine),) = asked
    assert settings.model_dump() == {key: field.default for key, field in Settings.model_fields.items()}
    assert machine.ranks == 3


def test_the_engines_log_level_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM is quiet while it is asked, unless its level was set."""
    key, seen = "VLLM_LOGGING_LEVEL", list[str | None]()

    def fake(*_: Any, **__: Any) -> list[Finding]:
        seen.append(os.environ.get(key))
        return [FINDINGS["ok"]]

    monkeypatch.setattr(doctor, "examine_extra", fake)
    for level in (None, "DEBUG"):
        monkeypatch.delenv(key, raising=False)
        if level is not None:
            monkeypatch.setenv(key, level)
        assert doctor.main("{}", as_json=False) == 0
        assert os.environ.get(key) == level
    assert seen == ["ERROR", "DEBUG"]


def test_without_torch_and_vllm() -> None:
    """In a process that has neither, the command answers: no traceback, and JSON alone on stdout."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; from kvpipe.doctor import main; "
        "sys.exit(main('{}', as_json=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["vllm"]["said"] == "it is not installed"
    assert {n for n, f in found.items() if f["status"] == "fail"} == {
        "torch",
        "vllm",
        "plugin",
        "device",
        "memory tier",
    }
    assert {found[n]["status"] for n in ("configuration", "python", "VLLM_PLUGINS", "shared memory")} == {"ok"}


def test_this_environment_passes() -> None:
    """What the tests run on is good: real facts, nothing fails. vLLM itself agrees with what is said of it."""
    settings = load_settings({})
    found = {f.name: f for f in examine(settings)}
    assert not [f for f in found.values() if f.status == "fail"]
    assert "vLLM knows KVPipeConnector" in found["plugin"].said
    assert Machine().hash_seeds().default == "sha256"
    if "PYTHONHASHSEED" not in os.environ:
        assert Machine().hash_seeds().random == {"xxhash", "xxhash_cbor"}

    from kvpipe.connectors.vllm.connector import KVPipeConnector

    for mode in ("layerwise", "step"):
        machine = Machine(device=lambda: CUDA)
        said = doctor.check_graphs(load_settings({"mode": mode}), machine).said
        assert KVPipeConnector.requires_piecewise_for_cudagraph({"mode": mode}) == ("PIECEWISE" in said)
