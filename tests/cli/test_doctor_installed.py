"""`kvpipe doctor` checks the installed versions of Python, PyTorch and vLLM, the plugin, and the hash seed."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli.doctor import installed
from kvpipe.cli.doctor.facts import HashSeeds
from kvpipe.config.settings import load_settings
from tests.cli.doctor_machines import ROOT, answer_of, machine_of, raising, unasked

LOADS = EntryPoint("kvpipe", "builtins:dict", "vllm.general_plugins")


def test_python(tmp_path: Path) -> None:
    """The oldest supported version of Python is accepted, and an older version is refused."""
    assert installed.check_python(load_settings(), machine_of(tmp_path, python=(3, 11, 0))) == ("ok", "3.11.0", "")
    old = answer_of(installed.check_python(load_settings(), machine_of(tmp_path, python=(3, 10, 14))))
    assert (old.status, old.detail) == ("fail", "3.10.14 is too old")
    assert "3.11 or newer" in old.remedy


def test_the_least_versions_are_the_packages() -> None:
    """The oldest supported versions equal the versions in `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">={}.{}".format(*installed.PYTHON_MIN)
    assert "torch>={}.{}".format(*installed.TORCH_MIN) in project["optional-dependencies"]["vllm"]


@pytest.mark.parametrize(
    ("version", "status", "detail"),
    [
        ("2.9.0", "ok", "2.9.0"),
        ("2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("2.8.1+cu126", "fail", "2.8.1+cu126 is too old, or not a release"),
        ("main", "fail", "main is too old, or not a release"),
    ],
)
def test_torch(tmp_path: Path, version: str, status: str, detail: str) -> None:
    """Versions of PyTorch are compared as numbers, not as text."""
    answer = answer_of(installed.check_torch(load_settings(), machine_of(tmp_path, torch_version=lambda: version)))
    assert (answer.status, answer.detail) == (status, detail)


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """If importing torch fails, the finding has the error in one line."""
    machine = machine_of(tmp_path, torch_version=raising(OSError("libgomp:\n  not found")))
    answer = answer_of(installed.check_torch(load_settings(), machine))
    assert (answer.status, answer.detail) == ("fail", "it cannot be imported (libgomp: not found)")
    assert "install torch 2.9 or newer" in answer.remedy


@pytest.mark.parametrize(
    ("fact", "status", "detail"),
    [
        (lambda: "0.32.0", "ok", "0.32.0"),
        (lambda: "0.33.1", "ok", "0.33.1"),
        (lambda: "0.31.2", "fail", "vLLM 0.31.2 is not supported"),
        (lambda: None, "fail", "it is not installed"),
        (raising(RuntimeError("bad build")), "fail", "installed, but cannot be imported (bad build)"),
    ],
)
def test_vllm(tmp_path: Path, fact: Any, status: str, detail: str) -> None:
    """An absent, a broken and an unsupported vLLM are distinguished. The remedy names the supported releases."""
    answer = answer_of(installed.check_vllm(load_settings(), machine_of(tmp_path, vllm_version=fact)))
    assert answer.status == status
    assert detail in answer.detail
    assert status == "ok" or "install vLLM 0.32 or 0.33" in answer.remedy


@pytest.mark.parametrize(
    ("plugins", "known", "status", "detail"),
    [
        ([LOADS], True, "ok", "builtins:dict loads, vLLM knows KVPipeConnector"),
        ([LOADS], False, "fail", "vLLM does not know KVPipeConnector after it"),
        ([], True, "fail", "no entry point 'kvpipe' of vllm.general_plugins is installed"),
        ([EntryPoint("kvpipe", "kvpipe.absent:register", "g")], True, "fail", "kvpipe.absent:register does not load"),
        ([EntryPoint("kvpipe", "operator:neg", "g")], True, "fail", "operator:neg does not load"),
        ([LOADS, EntryPoint("kvpipe", "kvpipe.absent:register", "g")], True, "fail", "kvpipe.absent:register does not"),
    ],
)
def test_plugin(tmp_path: Path, plugins: list[EntryPoint], known: bool, status: str, detail: str) -> None:
    """The check fails unless the entry point is installed, loads, can be called, and registers the connector."""
    machine = machine_of(tmp_path, plugins=lambda: plugins, connector_known=lambda: known)
    answer = answer_of(installed.check_plugin(load_settings(), machine))
    assert answer.status == status
    assert detail in answer.detail


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
    """Names in VLLM_PLUGINS are compared as vLLM compares them, including spaces. The remedy keeps the other names."""
    environ = {} if value is None else {"VLLM_PLUGINS": value}
    answer = answer_of(installed.check_plugin_filter(load_settings(), machine_of(tmp_path, environ=environ)))
    assert answer.status == status
    assert remedy in answer.remedy


@pytest.mark.parametrize(
    ("seed", "default", "name", "status", "detail"),
    [
        ("0", None, "docs", "ok", "PYTHONHASHSEED=0 seeds"),
        ("11", None, "", "ok", "only engines with the same value find each other's KV"),
        ("", None, "docs", "ok", "PYTHONHASHSEED="),  # vLLM accepts an empty text as a seed
        (None, "sha256", "docs", "ok", "sha256 (vLLM's default) gives equal hashes in all processes without it"),
        (None, "sha256", "", "ok", "a shared cache would need PYTHONHASHSEED with xxhash"),
        (None, "xxhash", "", "ok", "does not matter for a cache in one engine's memory"),
        (None, "xxhash", "docs", "warn", "vLLM seeds xxhash at random, so engines named 'docs' differ"),
    ],
)
def test_hash_seed(tmp_path: Path, seed: str | None, default: str | None, name: str, status: str, detail: str) -> None:
    """A random hash seed is a warning, but only if engines share a name."""
    environ = {} if seed is None else {"PYTHONHASHSEED": seed}
    seeds = unasked if default is None else (lambda: HashSeeds(default, frozenset({"xxhash"})))
    answer = answer_of(
        installed.check_hash_seed(
            load_settings({"name": name}), machine_of(tmp_path, environ=environ, hash_seeds=seeds)
        )
    )
    assert answer.status == status
    assert detail in answer.detail
    assert status == "ok" or "PYTHONHASHSEED" in answer.remedy


def test_otel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `otel` is set, OpenTelemetry must be installed."""
    assert installed.check_otel(load_settings({}), machine_of(tmp_path)) is None
    asked = load_settings({"otel": True})
    assert answer_of(installed.check_otel(asked, machine_of(tmp_path))).status == "ok"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    missing = answer_of(installed.check_otel(asked, machine_of(tmp_path)))
    assert (missing.status, missing.remedy) == ("fail", "pip install 'kvpipe[otel]', or set otel=false")
