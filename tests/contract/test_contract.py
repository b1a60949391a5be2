"""KVPipeConnector fits the recorded contract of every supported vLLM release, and the records fit vLLM."""

from __future__ import annotations

import copy
import fcntl
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvpipe.connectors.vllm.tiny.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.connectors.vllm import compat
from kvpipe.errors import UnsupportedError
from kvpipe.testing.waiting import WAIT_S
from tests.contract import fetch, judging, record, relied
from tests.contract import sources as c

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = c.recorded()
RECORD_BYTES_MAX = 30_000


def inspected() -> dict[str, c.Method]:
    """Return the methods that the imported class KVPipeConnector itself defines."""
    from kvpipe.connectors.vllm.connector import KVPipeConnector

    found = {}
    for name, value in vars(KVPipeConnector).items():
        if isinstance(value, classmethod):
            found[name] = c.Method("classmethod", inspect.signature(value.__func__))
        elif isinstance(value, staticmethod):
            found[name] = c.Method("staticmethod", inspect.signature(value.__func__))
        elif isinstance(value, property):
            assert value.fget is not None
            found[name] = c.Method("property", inspect.signature(value.fget))
        elif inspect.isfunction(value):
            found[name] = c.Method("method", inspect.signature(value))
    return found


def installed_root() -> Path:
    """Return the folder that holds the installed vLLM, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def record_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the recording tool."""
    command = [sys.executable, "-m", record.__name__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)


def write_sources(root: Path, version: str, changes: dict[str, tuple[str, str]]) -> None:
    """Copy the installed vLLM's recorded files to `root` as release `version`.

    `changes`: (pattern, replacement) by file.
    """
    for path in {*relied.SIGNATURES, *relied.FIELDS, *relied.RELIED}:
        text = (installed_root() / path).read_text(encoding="utf-8")
        if path in changes:
            text, hits = re.subn(*changes[path], text)
            assert hits, f"{changes[path]} changes nothing"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    (root / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n", encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_connector_fits_every_recorded_release(version: str) -> None:
    """Abstract methods are implemented, every allowed call is accepted, and every attribute that is read exists."""
    assert judging.mismatches(c.load(version), inspected()) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_constructor_is_called_by_names(version: str) -> None:
    """The recorded base accepts (vllm_config, role, kv_cache_config).

    KVPipeConnector's constructor accepts these arguments by name, and further arguments.
    """
    assert tuple(judging.base_methods(c.load(version))["__init__"].signature.parameters)[1:] == judging.CONSTRUCTOR
    ours = inspected()["__init__"].signature
    ours.bind("self", **dict.fromkeys(judging.CONSTRUCTOR), added_by_a_later_release=1)


@pytest.mark.parametrize("version", VERSIONS)
def test_record_names_its_version_and_the_abstract_methods(version: str) -> None:
    """A record is small and contains its own version.

    It marks abstract methods, because otherwise the check for abstract methods that kvpipe lacks could never fail.
    """
    text = (c.RECORDS / f"vllm-{version}.json").read_text(encoding="utf-8")
    assert len(text) < RECORD_BYTES_MAX
    assert json.loads(text)["version"] == version
    assert text == c.dump(c.load(version))
    abstract = {name for name, m in judging.base_methods(c.load(version)).items() if m.abstract}
    assert abstract >= {"start_load_kv", "save_kv_layer", "wait_for_save", "request_finished_all_groups"}


def test_supported_versions_are_the_recorded_ones() -> None:
    """compat.SUPPORTED and the records name the same releases."""
    recorded = {tuple(int(n) for n in v.split(".")[:2]) for v in VERSIONS}
    assert recorded == set(compat.SUPPORTED)


def test_the_record_of_the_installed_release_is_current() -> None:
    """Recording the installed vLLM again gives the committed record, byte for byte."""
    version, read = c.folder_reader(installed_root())
    assert version in VERSIONS
    assert c.dump(c.record(version, read)) == (c.RECORDS / f"vllm-{version}.json").read_text(encoding="utf-8")


def test_parsing_and_inspecting_the_connector_agree() -> None:
    """The methods parsed from the connector's source equal the methods of the imported class."""

    def shape(methods: dict[str, c.Method]) -> dict[str, Any]:
        return {
            name: (m.kind, [(p.name, p.kind, p.default is p.empty) for p in m.signature.parameters.values()])
            for name, m in methods.items()
        }

    assert shape(judging.connector_methods()) == shape(inspected())


@pytest.mark.parametrize(
    ("name", "ours", "stated"),
    [
        ("save_kv_layer", "method (self, layer_name, kv_layer, attn_metadata)", "another_keyword"),
        ("wait_for_layer_load", "method (self, name)", "layer_name"),
        ("update_state_after_alloc", "method (self, blocks, request, num_external_tokens)", "would arrive as"),
        ("get_finished", "method (self, finished_req_ids, more)", "more"),
        ("requires_kv_delivery", "method (self)", "is a property in vLLM"),
        ("requires_piecewise_for_cudagraph", "method (self, extra_config)", "is a classmethod in vLLM"),
        ("wait_for_save", None, "is abstract"),
        ("request_finished_all_groups", None, "is abstract"),
        ("__init__", "method (self, config, role, kv_cache_config)", "constructor"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_misfit_of_the_connector_is_found(version: str, name: str, ours: str | None, stated: str) -> None:
    """Each kind of mismatch in a method of the connector is found and named."""
    methods = inspected()
    if ours is None:
        del methods[name]
    else:
        methods[name] = c.parse_method(ours)
    found = judging.mismatches(c.load(version), methods)
    assert any(stated in line for line in found), found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_attribute_is_found(version: str) -> None:
    """If an attribute, class or dataclass that kvpipe uses is removed from a record, the check reports it."""
    whole = c.load(version)
    ours = inspected()
    for path, classes in relied.RELIED.items():
        for cls, attributes in classes.items():
            without_class = copy.deepcopy(whole)
            del without_class["attributes"][path][cls]
            assert judging.mismatches(without_class, ours) == [f"{path} has no class {cls}"]
            for attribute in attributes:
                record = copy.deepcopy(whole)
                record["attributes"][path][cls] = ", ".join(a for a in attributes if a != attribute)
                assert judging.mismatches(record, ours) == [f"{cls}.{attribute} is not in {path}"]
    for names in relied.FIELDS.values():
        for name in names:
            record = copy.deepcopy(whole)
            record["fields"][name] = ""
            assert any(name in line for line in judging.mismatches(record, ours))


def test_calls_cover_every_way_to_pass_arguments() -> None:
    """Calls cover all ways to pass arguments by position or name, with and without optional arguments."""
    method = c.parse_method("method (self, a, b=..., *, k, o=..., **more)")
    tried = [(positional, sorted(named)) for positional, named in judging.calls(method.signature)]
    assert (("self",), ["a", "k"]) in tried
    assert (("self", "a"), ["k"]) in tried
    assert (("self", "a"), ["b", "k", "o"]) in tried
    assert (("self", "a", "b"), ["k", "o"]) in tried
    assert (("self", "a"), ["another_keyword", "k"]) in tried


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "1.32.0", "0.3.2", "dev", "", "0.320.0"])
def test_other_versions_are_refused_in_one_sentence(found: str) -> None:
    """The message for a release without a record names the release, the reason, and what to install."""
    with pytest.raises(UnsupportedError) as refused:
        compat.check_version(found)
    assert str(refused.value) == (
        f"kvpipe: vLLM {found} is not supported (its connector contract is not recorded); install vLLM 0.32 or 0.33"
    )


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.33.1rc1", "0.32.0.post1"])
def test_recorded_versions_are_accepted(found: str) -> None:
    """Every build of a recorded release is accepted."""
    compat.check_version(found)


def test_the_installed_version_is_found_and_accepted() -> None:
    """The version of the imported vLLM is the version of the installed package, and is accepted."""
    version, _ = c.folder_reader(installed_root())
    assert compat.installed_version().startswith(version)
    compat.check_version(compat.installed_version())


def test_the_tool_gives_its_verdict_on_the_committed_records() -> None:
    """Without arguments the tool reports that every recorded release fits, and exits with 0."""
    done = record_tool()
    assert (done.returncode, done.stderr) == (0, "")
    for version in VERSIONS:
        assert f"vLLM {version}: fits\n" in done.stdout


def test_the_tool_judges_a_new_release(tmp_path: Path) -> None:
    """A new release that lacks an attribute, a file and a call shape is recorded.

    The tool names the mismatches, and its exit code is 1.
    """
    changes = {
        "vllm/v1/request.py": (r"\bnum_preemptions\b", "preemption_count"),
        relied.BASE: (r"def wait_for_save\(self\)", "def wait_for_save(self, step)"),
    }
    write_sources(tmp_path / "new", "0.34.0", changes)
    (tmp_path / "new" / "vllm/v1/metrics/cache_hit_source.py").unlink()
    done = record_tool(str(tmp_path / "new"), "--into", str(tmp_path / "records"))
    assert done.returncode == 1, done.stderr
    assert "vLLM 0.34.0: DOES NOT FIT" in done.stdout
    assert "Request.num_preemptions is not in vllm/v1/request.py" in done.stdout
    assert "wait_for_save does not accept (self, step)" in done.stdout
    assert "cache_hit_source.py has no class CacheHitSource" in done.stdout
    assert "compat.SUPPORTED does not name it" in done.stdout
    assert (tmp_path / "records" / "vllm-0.34.0.json").is_file()


def test_the_tool_lists_new_methods_and_fields_as_news(tmp_path: Path) -> None:
    """New methods and fields of a release are listed as news, not as mismatches."""
    records = tmp_path / "records"
    write_sources(tmp_path / "old", "0.32.0", {})
    added = (r"(class KVConnectorBase_V1\(ABC\):\n)", r"\1    def brand_new_hook(self, step=0): ...\n")
    write_sources(tmp_path / "new", "0.33.0", {relied.BASE: added})
    done = record_tool(str(tmp_path / "old"), str(tmp_path / "new"), "--into", str(records))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "news: new KVConnectorBase_V1.brand_new_hook: method (self, step=...)" in done.stdout


def test_the_tool_refuses_a_folder_without_vllm(tmp_path: Path) -> None:
    """A folder without vLLM ends with exit code 2 and a sentence, and writes no record."""
    (tmp_path / "empty").mkdir()
    done = record_tool(str(tmp_path / "empty"), "--into", str(tmp_path / "records"))
    assert done.returncode == 2
    assert str(tmp_path / "empty") in done.stderr
    assert not (tmp_path / "records").exists()


def test_no_registry_is_named() -> None:
    """The tools that fetch packages name no registry, so pip's own configuration decides which registry is used."""
    for tool in (record, fetch):
        assert not re.search(r"https?://|index-url|\.org\b|\.com\b", inspect.getsource(tool)), tool


def test_release_is_downloaded_once_when_two_processes_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process waits for the first.

    Otherwise the second process would replace the folder that the first process uses.
    """
    begun: list[str] = []
    second_is_there = threading.Event()
    second = threading.Thread(target=fetch.fetch, args=("0.99.0",))
    lock = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if threading.current_thread() is second:
            second_is_there.set()
        lock(file, operation)

    def download(version: str, folder: Path) -> Path:
        begun.append(version)
        if threading.current_thread() is not second:
            second.start()
            assert second_is_there.wait(WAIT_S)
        second_is_there.set()
        with zipfile.ZipFile(folder / "vllm.whl", "w") as wheel:
            wheel.writestr("vllm/_version.py", f"version = '{version}'")
        return folder / "vllm.whl"

    monkeypatch.setattr(fetch, "CACHE", tmp_path)
    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert (fetch.fetch("0.99.0") / "vllm" / "_version.py").is_file()
    second.join()
    assert begun == ["0.99.0"]
