"""`kvpipe doctor` checks the device, the processors and the memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from kvpipe.cli.doctor import hardware
from kvpipe.cli.doctor.checks import examine
from kvpipe.cli.doctor.facts import DeviceFacts, HostFacts
from kvpipe.cli.doctor.findings import PendingFinding
from kvpipe.config.settings import load_settings
from tests.cli.doctor_machines import CPU, CUDA, GIB, ROOT, answer_of, broken, machine_of, raising, unasked, write


def test_device(tmp_path: Path) -> None:
    """The device check accepts CUDA and CPU, and refuses other devices."""
    for device in (CUDA, CPU):
        machine = machine_of(tmp_path, device=lambda device=device: device)
        assert hardware.check_device(load_settings(), machine) == ("ok", device.label, "")
    other = answer_of(
        hardware.check_device(load_settings(), machine_of(tmp_path, device=lambda: DeviceFacts("xpu", "XPU")))
    )
    assert other.status == "fail"
    assert "'xpu'" in other.detail


@pytest.mark.parametrize(
    ("device", "mode", "detail"),
    [
        (CUDA, "layerwise", "captures PIECEWISE graphs instead of full ones; mode=auto and mode=step keep full graphs"),
        (CUDA, "auto", "after the forward in steps that are replayed: vLLM keeps its full CUDA graphs"),
        (CUDA, "step", "keeps its full CUDA graphs"),
        (CPU, "layerwise", "mode=layerwise; there are no CUDA graphs"),
    ],
)
def test_graphs(tmp_path: Path, device: DeviceFacts, mode: str, detail: str) -> None:
    """For each `mode`, the finding names the kind of CUDA graphs."""
    answer = answer_of(
        hardware.check_graphs(load_settings({"mode": mode}), machine_of(tmp_path, device=lambda: device))
    )
    assert answer.status == "ok"
    assert detail in answer.detail


@pytest.mark.parametrize(
    ("limit", "pins", "status", "detail"),
    [
        (None, None, "ok", "the limit is none"),
        (GIB, None, "ok", "the limit is 1.0GiB, the pool 1.0GiB"),
        (8 << 20, True, "ok", "but the driver still pins 24.0MiB"),
        (8 << 20, False, "warn", "24.0MiB could not be pinned (CUDA error 2)"),
        (GIB - 1, None, "warn", "if the driver enforces the limit"),
    ],
)
def test_locked_memory(tmp_path: Path, limit: int | None, pins: bool | None, status: str, detail: str) -> None:
    """If the limit is below the pool's size, the check tries to pin slightly more than the limit."""
    asked: list[int] = []
    pin = {None: unasked, True: asked.append, False: raising(RuntimeError("CUDA error 2"))}[pins]
    machine = machine_of(tmp_path, device=lambda: CUDA, locked_bytes_max=lambda: limit, pin=pin)
    answer = answer_of(hardware.check_locked_memory(load_settings({"pool_bytes_max": GIB}), machine))
    assert answer.status == status
    assert detail in answer.detail
    assert asked == ([24 << 20] if pins else [])
    assert status == "ok" or f"to {GIB} bytes" in answer.remedy


def test_locked_memory_is_the_systems_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft RLIMIT_MEMLOCK is used; "unlimited" is reported as None.

    Without a CUDA device the limit has no effect.
    """
    for soft, most in ((65_536, 65_536), (resource.RLIM_INFINITY, None)):
        limits = {resource.RLIMIT_MEMLOCK: (soft, resource.RLIM_INFINITY)}
        monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
        assert HostFacts().locked_bytes_max() == most
    answer = hardware.check_locked_memory(load_settings(), machine_of(tmp_path, device=lambda: CPU))
    assert answer == ("ok", "nothing is pinned without a CUDA device", "")


@pytest.mark.parametrize(
    ("environ", "cpus", "siblings", "ranks", "spare"),
    [
        ({}, 8, 1, 1, 2),  # vLLM reserves two cores per rank
        ({}, 8, 2, 1, 6),  # vLLM uses one thread of each of the four cores, except two reserved cores
        ({}, 8, 1, 2, 4),
        ({}, 2, 1, 1, 0),  # with two cores, vLLM reserves none
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, 2, 1, 1, 1),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, 8, 1, 1, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-6"}, 8, 1, 1, 1),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3|4,5-7"}, 8, 1, 2, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 8, 1, 1, 0),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "5"}, 8, 1, 1, 3),
    ],
)
def test_copy_core(tmp_path: Path, environ: dict[str, str], cpus: int, siblings: int, ranks: int, spare: int) -> None:
    """Cores to which vLLM binds no thread are free for kvpipe's copy threads."""
    for cpu in range(cpus) if siblings > 1 else ():
        write(tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu // siblings}\n")
    machine = machine_of(
        tmp_path, device=lambda: CPU, environ=environ, ranks=ranks, cpus=lambda: frozenset(range(cpus))
    )
    answer = answer_of(hardware.check_copy_core(load_settings(), machine))
    if spare:
        assert answer.status == "ok"
        assert answer.detail.startswith(f"{spare} of {cpus} cores left")
    else:
        assert answer.status == "warn"
        assert f"no core of {cpus} is left" in answer.detail


def test_copy_core_remedies(tmp_path: Path) -> None:
    """The remedy names cores of this machine. If `copy_threads` is set to 0, there is no warning."""
    machine = machine_of(tmp_path, device=lambda: CPU, cpus=lambda: frozenset({4, 6}))
    answer = answer_of(hardware.check_copy_core(load_settings(), machine))
    assert "VLLM_CPU_OMP_THREADS_BIND=4;" in answer.remedy
    assert "inside the forward" in answer.detail
    answer = answer_of(hardware.check_copy_core(load_settings({"copy_threads": 1}), machine))
    assert (answer.status, "compete with the forward" in answer.detail) == ("warn", True)
    answer = answer_of(hardware.check_copy_core(load_settings(), machine._replace(cpus=lambda: frozenset({4}))))
    assert answer.remedy == "set copy_threads to 0 to accept this"
    assert answer_of(hardware.check_copy_core(load_settings({"copy_threads": 0}), machine)).status == "ok"
    assert (
        answer_of(hardware.check_copy_core(load_settings(), machine_of(tmp_path, device=lambda: CUDA))).status == "ok"
    )


def _memory(tmp_path: Path, available: int, ranks: int = 1, pool: int = 4 * GIB) -> PendingFinding:
    write(tmp_path / "proc" / "meminfo", f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:  {available >> 10} kB\n")
    machine = machine_of(tmp_path, ranks=ranks)
    return answer_of(hardware.check_memory(load_settings({"pool_bytes_max": pool}), machine))


@pytest.mark.parametrize(
    ("available", "ranks", "status"),
    [
        (5 * GIB, 1, "ok"),  # 80 % of the free memory
        (5 * GIB - 1024, 1, "warn"),
        (4 * GIB, 1, "warn"),  # 100 % of the free memory
        (4 * GIB - 1024, 1, "fail"),
        (10 * GIB, 2, "ok"),
        (9 * GIB, 2, "warn"),
        (7 * GIB, 2, "fail"),
        (0, 1, "fail"),
    ],
)
def test_memory(tmp_path: Path, available: int, ranks: int, status: str) -> None:
    """All pools together may take 80 % of the free memory.

    More than 80 % is a warning, and more than 100 % is a failure.
    """
    assert _memory(tmp_path, available, ranks).status == status


def test_memory_sentences(tmp_path: Path) -> None:
    """The finding has the sizes, the source of the limit, and a size that fits."""
    assert _memory(tmp_path, 20 * GIB) == (
        "ok",
        "pool_bytes_max is 4.0GiB, 20.0GiB are free (MemAvailable): 20%; there is room for 4 ranks",
        "",
    )
    two = _memory(tmp_path, 5 * GIB, ranks=2)
    assert two.detail.startswith("pool_bytes_max is 2 x 4.0GiB, 5.0GiB are free (MemAvailable): the pool does not fit")
    assert two.remedy.startswith("set pool_bytes_max to 2048MiB or less")
    assert _memory(tmp_path, 5 * GIB, ranks=2, pool=2048 << 20).status == "ok"  # with the remedy's size the check is ok
    assert _memory(tmp_path, 0).remedy == "free some memory"


@pytest.mark.parametrize(
    ("group", "folder", "names"),
    [
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "a/b", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),  # the limit of a parent group counts
        ("0::/../x", "", ("memory.max", "memory.current", "inactive_file")),
        ("1:cpu:/\n4:memory:/a", "memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("4:memory:/host/a", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_memory_in_a_cgroup(tmp_path: Path, group: str, folder: str, names: tuple[str, str, str]) -> None:
    """Free memory is a cgroup's limit minus the cgroup's use, if this is less than the system's free memory.

    Idle file pages count as free.
    """
    limit, usage, idle = names
    write(tmp_path / "proc" / "self" / "cgroup", group + "\n")
    write(tmp_path / "x" / limit, "1\n")  # the limit of a group outside of the namespace has no effect
    write(tmp_path / "x" / usage, "0\n")
    write(tmp_path / "x" / "memory.stat", "")
    where = tmp_path / "cgroup" / folder
    write(where / limit, f"{8 * GIB}\n")
    write(where / usage, f"{5 * GIB}\n")
    write(where / "memory.stat", f"anon 1\n{idle} {2 * GIB}\n")
    assert _memory(tmp_path, 100 * GIB, pool=4 * GIB).detail.startswith(
        "pool_bytes_max is 4.0GiB, 5.0GiB are free (cgroup limit 8.0GiB): 80%"
    )
    assert "(MemAvailable)" in _memory(tmp_path, 4 * GIB, pool=GIB).detail
    write(where / usage, f"{11 * GIB}\n")  # the group's use is above its limit
    assert _memory(tmp_path, 100 * GIB).status == "fail"
    write(where / limit, "max\n" if limit == "memory.max" else f"{(1 << 63) - 4096}\n")
    assert "(MemAvailable)" in _memory(tmp_path, 100 * GIB).detail


def test_memory_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    """On a system without /proc the result is a warning, not a failure."""
    found = {f.name: f for f in examine(load_settings(), broken(tmp_path))}
    assert found["free memory"].status == "warn"
    assert "meminfo" in found["free memory"].detail


def test_shared_memory(tmp_path: Path) -> None:
    """The check of shared memory is always ok, because kvpipe does not use shared memory."""
    answer = hardware.check_shared_memory(load_settings(), machine_of(tmp_path))
    assert (answer.status, "not used" in answer.detail) == ("ok", True)
    sources = [p for p in (ROOT / "kvpipe").rglob("*.py") if not {"doctor", "testing"} & {*p.parts}]
    assert not [p for p in sources if re.search(r"dev.shm|shared_memory|shm_open", p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [("never", "warn", "echo advise | sudo tee"), ("advise", "ok", "pages of 2.0MiB"), ("", "ok", "no huge pages")],
)
def test_huge_pages(tmp_path: Path, mode: str, status: str, said: str) -> None:
    """The remedy is the command that allows huge pages. Without `pool: node` huge pages are not checked."""
    machine = machine_of(tmp_path)
    if mode:
        write(machine.huge_pages / "hpage_pmd_size", str(2 << 20))
        write(machine.huge_pages / "shmem_enabled", f"always [{mode}] deny")
    assert hardware.check_huge_pages(load_settings(), machine) is None
    found = answer_of(hardware.check_huge_pages(load_settings({"pool": "node"}), machine))
    assert (found.status, said in found.detail + found.remedy) == (status, True), found
