"""`kvpipe doctor` checks folders, files, the pool and tiers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from kvpipe.cli.doctor import storage
from kvpipe.cli.doctor.checks import examine
from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import Finding, PendingFinding
from kvpipe.config.settings import Settings, load_settings
from kvpipe.tiers.envelope import DamagedError
from kvpipe.tiers.first_hash import ANY, leave_first_hash
from kvpipe.tiers.guard import WRITE, guarded
from kvpipe.tiers.registry import make_tier, named
from tests.cli.doctor_machines import GIB, answer_of, broken, free_bytes_of, machine_of, raising


def test_state_dir(tmp_path: Path) -> None:
    """The state folder is needed only for a name or for tiers.

    With a name, a folder that cannot be created is a failure.
    """
    unused = ("ok", "not used, because neither `name` nor `tiers` is set", "")
    assert storage.check_state_dir(load_settings(), machine_of(tmp_path)) == unused
    good, bad = tmp_path / "to" / "be" / "made", tmp_path / "file" / "folder"
    bad.parent.write_text("", encoding="utf-8")
    machine = machine_of(tmp_path, free_bytes=free_bytes_of(GIB))
    cases: list[tuple[dict[str, Any], HostFacts, str, str]] = [
        ({"name": "docs", "state_dir": good}, machine, "ok", f"{good} is writable"),
        ({"name": "docs", "state_dir": bad}, machine, "fail", f"{bad} is not writable"),
        ({"state_dir": bad}, machine, "warn", f"{bad} is not writable"),
        (
            {"name": "docs", "state_dir": good},
            machine._replace(free_bytes=free_bytes_of(4096)),
            "fail",
            "only 4.0KiB left",
        ),
    ]
    for extra, on, status, detail in cases:
        answer = answer_of(storage.check_state_dir(load_settings(extra), on))
        assert (answer.status, detail in answer.detail) == (status, True), answer
    assert not good.parent.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]  # the check leaves no file


def test_the_default_state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no state folder is set, a name is registered in the default folder of `kvpipe.inputs.cache_names`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    answer = storage.check_state_dir(
        load_settings({"name": "docs"}), machine_of(tmp_path, free_bytes=free_bytes_of(GIB))
    )
    assert answer == ("ok", f"{tmp_path / 'state' / 'kvpipe'} is writable", "")


def test_a_folder_that_refuses_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check tries to write instead of reading permission bits, because root may write in spite of the bits."""
    monkeypatch.setattr("tempfile.TemporaryFile", raising(OSError(30, "Read-only file system")))
    settings = load_settings({"name": "docs", "state_dir": tmp_path})
    traced = cast("Settings", SimpleNamespace(trace_file=tmp_path / "trace.jsonl"))
    for answer in (
        storage.check_state_dir(settings, machine_of(tmp_path)),
        storage.check_trace_file(traced, machine_of(tmp_path)),
    ):
        known = answer_of(answer)
        assert (known.status, "Read-only file system" in known.detail) == ("fail", True)


def test_trace_file(tmp_path: Path) -> None:
    """A trace file is checked only if it is set.

    Its folder must exist, and without room for the trace there is a warning.
    """

    def ask(path: Path | None, free: int = 2 * GIB, **others: int) -> PendingFinding | None:
        settings = cast("Settings", SimpleNamespace(trace_file=path, **{"trace_bytes_max": 1 << 30} | others))
        return storage.check_trace_file(settings, machine_of(tmp_path, free_bytes=free_bytes_of(free)))

    path = tmp_path / "trace.jsonl"
    assert ask(None) is None
    assert storage.check_trace_file(load_settings({}), machine_of(tmp_path)) is None
    assert answer_of(ask(path)) == ("ok", f"{tmp_path} is writable and has 2.0GiB left", "")
    assert answer_of(ask(path, GIB)).status == "ok"
    tight = answer_of(ask(path, GIB - 1))
    assert (tight.status, "a trace grows to 1.0GiB" in tight.detail) == ("warn", True)
    assert answer_of(ask(path, 4096, trace_bytes_max=4096)).status == "ok"
    assert answer_of(ask(path, 4095, trace_bytes_max=4096)).status == "warn"
    assert answer_of(ask(tmp_path)).detail.startswith(f"{tmp_path} is a folder")
    absent = answer_of(ask(tmp_path / "absent" / "trace.jsonl"))
    assert (absent.status, "is not a folder that exists" in absent.detail) == ("fail", True)
    os.mkfifo(path)
    assert answer_of(ask(path, 0)) == ("ok", f"{path} is a pipe or a device", "")


def test_control_file(tmp_path: Path) -> None:
    """The engine only reads the control file, so if this user cannot write to the folder, this is only a warning."""

    def ask(path: Path | None) -> PendingFinding | None:
        settings = load_settings({"control_file": path})
        return storage.check_control_file(settings, machine_of(tmp_path, free_bytes=free_bytes_of(0)))

    assert ask(None) is None
    assert answer_of(ask(tmp_path / "new" / "control")).status == "ok"
    assert not (tmp_path / "new").exists()
    assert answer_of(ask(tmp_path)).status == "fail"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert answer_of(ask(tmp_path / "file" / "control")).status == "warn"


@pytest.mark.parametrize(("pool", "probe"), [("4GiB", "16.0MiB"), ("3MiB", "3.0MiB"), (8192, "8.0KiB")])
def test_memory_tier(tmp_path: Path, pool: str | int, probe: str) -> None:
    """The check allocates a small pool, never the configured pool."""
    answer = answer_of(storage.check_memory_pool(load_settings({"pool_bytes_max": pool}), machine_of(tmp_path)))
    assert answer.status == "ok"
    assert answer.detail.startswith(f"a pool of {probe} was allocated, written and read")


def test_memory_tier_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is too small, that the system refuses, or that loses bytes is a failure."""

    def found(extra: dict[str, Any] | None = None) -> Finding:
        return next(f for f in examine(load_settings(extra), broken(tmp_path)) if f.name == "memory pool")

    small = found({"pool_bytes_max": 100})
    assert (small.status, "pool_bytes_max=100B is smaller than one chunk" in small.detail) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr("kvpipe.transfer.pool.mmap.mmap", raising(OSError(12, "Cannot allocate memory")))
        refused = found()
    assert (refused.status, "Cannot allocate memory" in refused.detail) == ("fail", True)
    with monkeypatch.context() as patch:
        patch.setattr("kvpipe.transfer.pool.HostPool.slot", lambda pool, index: pool.tensor[index].clone())
        forgets = found()
    assert (forgets.status, forgets.detail) == ("fail", "15 of 16 slots returned other bytes than were written to them")


def test_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working tier is listed, and a failing tier is named with the reason. Without tiers there is no finding."""

    def found(*tiers: object) -> PendingFinding | None:
        return storage.check_tiers(load_settings({"tiers": list(tiers)}), machine_of(tmp_path))

    assert found() is None
    disk = {"kind": "disk", "path": str(tmp_path / "kv")}
    answer = answer_of(found(disk))
    assert (answer.status, answer.detail) == ("ok", "a value was written, read and deleted: disk")
    assert not (tmp_path / "kv").exists()
    (tmp_path / "kv").mkdir()
    assert answer_of(found(disk)).status == "ok"
    assert list((tmp_path / "kv").iterdir()) == []
    deep = {"kind": "disk", "path": str(tmp_path / "a" / "b" / "kv")}
    assert answer_of(found(deep)).status == "ok"
    assert not (tmp_path / "a").exists()
    answer = answer_of(found({"kind": "redis", "host": "127.0.0.1", "port": 1}, disk))
    assert answer.status == "warn"
    assert answer.detail.startswith("redis: ")
    assert "disk" not in answer.detail
    monkeypatch.setattr("kvpipe.tiers.envelope.Sealer.unseal", raising(DamagedError("checksum")))
    assert answer_of(found(disk)).detail == "disk: the check read its value back damaged (checksum)"


async def _leave(settings: Settings, first: str) -> None:
    """Leave the first hash of an engine in the tier of the settings."""
    ((name, spec),) = named(settings.tiers)
    (tier,) = guarded([(name, spec, make_tier(name, spec, writes=True))], (WRITE,))
    await tier.tier.open()
    await leave_first_hash(tier, ANY, first)
    await tier.tier.close()


def test_the_first_hash_of_another_engine_is_named(tmp_path: Path) -> None:
    """An engine in this environment would find no chunks of engines with another PYTHONHASHSEED.

    So the tier's finding is a warning.
    """
    settings = load_settings({"tiers": str(tmp_path / "kv")})
    machine = machine_of(tmp_path, first_hash=lambda algorithm: f"{algorithm} a")
    assert storage.check_first_hash(load_settings(), machine) is None
    assert storage.check_first_hash(settings, machine) is None
    for first, status, text in (
        ("xxhash a", "ok", "have the same seed as those"),
        ("sha256 b", "warn", "another PYTHONHASHSEED"),
    ):
        anyio.run(_leave, settings, first)
        answer = answer_of(storage.check_first_hash(settings, machine))
        assert answer.status == status
        assert text in answer.detail
    assert "same PYTHONHASHSEED" in answer.remedy
