"""`kvpipe doctor` finds wrong settings for operators, which would make an engine's start fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli.doctor.checks import examine
from kvpipe.cli.doctor.findings import Finding
from kvpipe.config.settings import load_settings
from tests.cli.doctor_machines import broken


def _found(tmp_path: Path, name: str, **keys: Any) -> list[Finding]:
    return [one for one in examine(load_settings(keys), broken(tmp_path)) if one.name == name]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Write a usable token and return its file."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("t0" * 16, encoding="utf-8")
    return file


def test_manage(tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check needs the token, the socket's folder and the extra. Without `manage` there is no finding."""
    at = f"unix:{tmp_path}/{{engine}}.sock"
    assert _found(tmp_path, "manage") == []
    (good,) = _found(tmp_path, "manage", manage=at, manage_token_file=token)
    assert (good.status, good.detail) == ("ok", f"operators are served at {at}, with the token")
    for other in ("127.0.0.1:8700", f"unix:{tmp_path}/{{engine}}/x.sock"):
        assert _found(tmp_path, "manage", manage=other, manage_token_file=token)[0].status == "ok"
    (bad,) = _found(tmp_path, "manage", manage=at)
    assert (bad.status, "without a token; set manage_token_file" in bad.detail) == ("fail", True)
    (bad,) = _found(tmp_path, "manage", manage=f"unix:{tmp_path}/none/x.sock", manage_token_file=token)
    assert (bad.status, bad.detail) == ("fail", f"the socket's folder {tmp_path}/none does not exist")
    token.chmod(0o644)
    (bad,) = _found(tmp_path, "manage", manage=at, manage_token_file=token)
    assert (bad.status, "chmod 0600" in bad.detail) == ("fail", True)
    token.chmod(0o600)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    (bad,) = _found(tmp_path, "manage", manage=at, manage_token_file=token)
    assert (bad.status, bad.remedy) == ("fail", "pip install 'kvpipe[manage]'")


def test_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quota's salt must be readable, and different from the other salts."""
    alice = {"name": "alice", "salt_env": "ALICE_SALT"}
    assert _found(tmp_path, "quotas") == []
    (bad,) = _found(tmp_path, "quotas", quotas=[alice])
    assert (bad.status, "alice: environment variable that salt_env names is not set" in bad.detail) == ("fail", True)
    monkeypatch.setenv("ALICE_SALT", "a salt")
    (good,) = _found(tmp_path, "quotas", quotas=[alice, {"name": "others", "limit": 0.5}])
    assert (good.status, good.detail) == ("ok", "every salt can be read, and no two quotas have the same salt")
    (bad,) = _found(tmp_path, "quotas", quotas=[alice, {"name": "bob", "salt": "a salt"}])
    assert (bad.status, "alice and bob have the same salt" in bad.detail) == ("fail", True)
    assert "a salt" not in bad.detail
