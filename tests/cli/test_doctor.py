"""`kvpipe doctor` turns its findings into a list, a verdict and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli.doctor import checks, hardware
from kvpipe.cli.doctor import print as printing
from kvpipe.cli.doctor.checks import examine
from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import Check, Finding
from kvpipe.config.settings import Settings, load_settings
from kvpipe.testing.waiting import WAIT_S
from tests.cli.doctor_machines import CUDA, broken, machine_of, raising


def test_a_check_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that raises becomes a one-line finding with its own status.

    Checks of tiers run last, and more checks can be added.
    """
    monkeypatch.setattr(checks, "CHECKS", [Check("one", raising(KeyError("a\nb")), "warn")])
    monkeypatch.setattr(checks, "TIERS", [*checks.TIERS, Check("store", raising(OSError("x" * 9999)), "fail")])
    first, memory, store = examine(load_settings(), machine_of(tmp_path))
    assert first[:3] == ("one", "warn", r"could not be checked (KeyError: 'a\nb')")
    assert first.remedy
    assert memory[:2] == ("memory pool", "ok")
    assert store[:2] == ("store", "fail")
    assert len(store.detail) < 500


def test_every_check_has_an_answer_when_every_question_fails(tmp_path: Path) -> None:
    """On a machine where every question fails, every check has an answer."""
    found = examine(load_settings({"name": "docs"}), broken(tmp_path))
    assert {f.name for f in found} == {c.name for c in (*checks.CHECKS, *checks.TIERS)} - {
        "trace_file",
        "control_file",
        "otel",
        "manage",
        "quotas",
        "tiers",
        "connectors",
        "first hash",
        "node pool",
        "huge pages",
    }
    assert all(f.remedy for f in found if f.status != "ok")
    assert {f.name for f in found if f.status == "ok"} == {"python", "VLLM_PLUGINS", "shared memory", "memory pool"}


FINDINGS = {
    "ok": Finding("torch", "ok", "2.13.0", ""),
    "warn": Finding("copy core", "warn", "no core [0] is\nleft", "leave one"),
    "fail": Finding("vllm", "fail", "it is not installed " + "x" * 200, "install it"),
}


def _run(monkeypatch: pytest.MonkeyPatch, extra: str, *found: str, as_json: bool = False) -> int:
    """Run the command with checks that return `findings`, and with the check of the configuration."""

    def fake(_: Settings, __: HostFacts) -> list[Finding]:
        print("noise of an engine")
        return [FINDINGS[one] for one in found]

    monkeypatch.setattr(checks, "examine", fake)
    return printing.main(extra, as_json=as_json)


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
    """The exit status is 1 if a check has failed, and 0 with warnings only."""
    assert _run(monkeypatch, "{}", *found) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_tiers_and_quotas_are_given_by_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The finding has only the names of tiers and quotas. The output of `kvpipe check` has their keys."""
    tiers = f'["{tmp_path}/a?bytes_max=1GiB", "{tmp_path}/b?bytes_max=1GiB"]'
    _run(monkeypatch, f'{{"tiers": {tiers}, "quotas": [{{"name": "one", "salt": "s", "share": 0.5}}]}}', "ok")
    assert "valid (quotas=one, tiers=disk,disk-2)" in capsys.readouterr().out


def test_output_is_a_line_per_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A remedy is indented below its check. Long lines are not wrapped in a pipe.

    The output of other code is not printed.
    """
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


def test_json_output_has_status_verdict_and_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` prints one object with the worst status, the verdict and every finding."""
    assert _run(monkeypatch, "{}", "warn", "fail", as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "status": "fail",
        "verdict": "kvpipe will not work here as it is: 1 of 3 checks failed and there is 1 warning.",
        "findings": [
            {"name": "configuration", "status": "ok", "detail": "valid (all defaults)", "remedy": ""},
            *({**FINDINGS[one]._asdict()} for one in ("warn", "fail")),
        ],
    }
    assert _run(monkeypatch, "{}", "warn", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "warn"


@pytest.mark.parametrize(
    ("extra", "detail"),
    [
        ('{"chunk_sizee": 4}', "kvpipe: unknown key 'chunk_sizee' in the kv_connector_extra_config; did you mean"),
        ('{"chunk_tokens": 0}', "kvpipe: chunk_tokens=0 is not valid"),
        ("{", "kvpipe: extra is not JSON ("),
        ("[1]", "kvpipe: extra is of type list, not a JSON object"),
    ],
)
def test_a_wrong_configuration_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], extra: str, detail: str
) -> None:
    """A wrong configuration is a failed check with its own message. The other checks still run."""
    assert _run(monkeypatch, extra, "ok", as_json=True) == 1
    first, second = json.loads(capsys.readouterr().out)["findings"]
    assert (first["name"], first["status"], first["detail"].startswith(detail)) == ("configuration", "fail", True), (
        first
    )
    assert "defaults" in first["remedy"]
    assert second["name"] == "torch"


def test_a_wrong_environment_leaves_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the environment is wrong, the other checks use the default settings and the given number of ranks."""
    asked: list[tuple[Settings, HostFacts]] = []

    def fake(*args: Any) -> list[Finding]:
        asked.append(args)
        return []

    monkeypatch.setattr(checks, "examine", fake)
    monkeypatch.setenv("KVPIPE_MODE", "wrong")
    monkeypatch.setenv("KVPIPE_NAME", "docs")
    assert [f.status for f in checks.examine_extra("{}", ranks=3)] == ["fail"]
    ((settings, machine),) = asked
    assert settings.model_dump() == {key: field.default for key, field in Settings.model_fields.items()}
    assert machine.ranks == 3


def test_the_engines_log_level_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs only errors during the checks, unless VLLM_LOGGING_LEVEL is set.

    After the checks the former level applies.
    """
    key, seen = "VLLM_LOGGING_LEVEL", list[str | None]()

    def fake(*_: Any, **__: Any) -> list[Finding]:
        seen.append(os.environ.get(key))
        return [FINDINGS["ok"]]

    monkeypatch.setattr(printing, "examine_extra", fake)
    for level in (None, "DEBUG"):
        monkeypatch.delenv(key, raising=False)
        if level is not None:
            monkeypatch.setenv(key, level)
        assert printing.main("{}", as_json=False) == 0
        assert os.environ.get(key) == level
    assert seen == ["ERROR", "DEBUG"]


def test_without_torch_and_vllm() -> None:
    """In a process without torch and vLLM the command prints no traceback, and prints only JSON to stdout."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; from kvpipe.cli.doctor.print import main; "
        "sys.exit(main('{}', as_json=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["vllm"]["detail"] == "it is not installed"
    assert {n for n, f in found.items() if f["status"] == "fail"} == {
        "torch",
        "vllm",
        "plugin",
        "device",
        "memory pool",
    }
    assert {found[n]["status"] for n in ("configuration", "python", "VLLM_PLUGINS", "shared memory")} == {"ok"}


def test_this_environment_passes() -> None:
    """The real facts of the test environment fail no check, and vLLM agrees with the details about vLLM."""
    settings = load_settings({})
    found = {f.name: f for f in examine(settings)}
    assert not [f for f in found.values() if f.status == "fail"]
    assert "vLLM knows KVPipeConnector" in found["plugin"].detail
    assert HostFacts().hash_seeds().default == "sha256"
    if "PYTHONHASHSEED" not in os.environ:
        assert HostFacts().hash_seeds().random == {"xxhash", "xxhash_cbor"}

    from kvpipe.connectors.vllm.connector import KVPipeConnector

    for mode in ("auto", "layerwise", "step"):
        machine = HostFacts(device=lambda: CUDA)
        detail = hardware.check_graphs(load_settings({"mode": mode}), machine).detail
        assert KVPipeConnector.requires_piecewise_for_cudagraph({"mode": mode}) == ("PIECEWISE" in detail)
