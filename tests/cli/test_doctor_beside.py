"""`kvpipe doctor` reports the connectors beside kvpipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpipe.cli.doctor import beside, checks
from kvpipe.config.settings import load_settings
from tests.cli.doctor_machines import answer_of, machine_of

OWN, NIXL = {"kv_connector": "KVPipeConnector"}, {"kv_connector": "NixlConnector"}


def _beside(*children: object) -> str:
    return json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}})


def test_the_whole_flag_is_taken_apart() -> None:
    """kvpipe's extra config is found if it is given alone, in vLLM's flag, or under MultiConnector."""
    extra = {"chunk_tokens": 512}
    own = OWN | {"kv_connector_extra_config": extra, "kv_role": "kv_both"}
    assert beside.read_input(json.dumps(own)) == (json.dumps(extra), "kv_both", ("KVPipeConnector",))
    assert beside.read_input(_beside(NIXL, own)) == (json.dumps(extra), "kv_both", ("NixlConnector", "KVPipeConnector"))
    for given in (json.dumps(extra), "[1]", "{", "[" * 100_000):
        assert beside.read_input(given) == (given, "", ())


@pytest.mark.parametrize(
    ("children", "installed", "status", "remedy"),
    [
        ((OWN, NIXL), True, "ok", ""),
        ((NIXL, OWN), True, "warn", "list KVPipeConnector first"),
        ((OWN, NIXL), False, "fail", "pip install --no-deps nixl nixl-cu12"),
        ((NIXL,), True, "fail", "add KVPipeConnector in front"),
        ((NIXL, 3, {}), True, "fail", "add KVPipeConnector in front"),
    ],
)
def test_doctor_names_a_wrong_order_and_a_missing_wheel(
    tmp_path: Path, children: tuple[object, ...], installed: bool, status: str, remedy: str
) -> None:
    """The remedy names the command to run, or the change to make."""
    names = beside.read_input(_beside(*children)).connectors
    machine = machine_of(tmp_path, connectors=names, has_module=lambda name: installed and name == "nixl")
    answer = answer_of(beside.check_connectors(load_settings(), machine))
    assert answer.status == status
    assert remedy in answer.remedy


def test_doctor_checks_connectors_only_where_they_are_given(tmp_path: Path) -> None:
    """An extra config alone does not name other connectors, so the check has no result."""
    assert beside.check_connectors(load_settings(), machine_of(tmp_path)) is None


def test_doctor_takes_the_whole_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key of kvpipe is also found under MultiConnector."""
    monkeypatch.setattr(checks, "CHECKS", [])
    monkeypatch.setattr(checks, "TIERS", [])
    (first,) = checks.examine_extra(_beside(OWN | {"kv_connector_extra_config": {"chunk_sizee": 256}}))
    assert first.status == "fail"
    assert "chunk_sizee" in first.detail


@pytest.mark.parametrize(("role", "status"), [("kv_producer", "fail"), ("kv_both", "ok")])
def test_doctor_refuses_a_producer_that_would_store_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, status: str
) -> None:
    """The check needs vLLM's whole flag, because only this flag has the role."""
    monkeypatch.setattr(checks, "CHECKS", [])
    monkeypatch.setattr(checks, "TIERS", [])
    own = {"tiers": [f"{tmp_path}?store=second_use"]}
    for flag in (OWN | {"kv_role": role, "kv_connector_extra_config": own}, own):
        (first,) = checks.examine_extra(json.dumps(flag))
        assert first.status == (status if "kv_role" in flag else "ok")
        assert ("set store='all', or kv_role='kv_both'" in first.detail) == (first.status == "fail")
