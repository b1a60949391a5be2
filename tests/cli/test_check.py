"""`kvpipe check` finds problems without an engine, and prints values in the form in which users write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvpipe.cli.main import main
from kvpipe.config.settings import Settings, load_settings
from kvpipe.errors import ConfigError
from kvpipe.inputs import plugins
from kvpipe.inputs.values import exact_size
from kvpipe.tiers.registry import parse_tier


def _refusal(extra: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", json.dumps(extra)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


def _token(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("t0" * 16, encoding="utf-8")
    return {"manage_token_file": str(file)}


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (
            {"pool_bytes_max": 100},
            "pool_bytes_max=100B is smaller than one chunk, which takes at least 4KiB; set it to",
        ),
        ({"manage": "127.0.0.1:1"}, "manage='127.0.0.1:1' without a token; set manage_token_file or manage_token_env"),
        ({"manage": "127.0.0.1:1", "manage_token_env": "NOT_SET"}, "variable that manage_token_env names is empty or"),
        ({"manage_token_file": "/nowhere/token"}, "manage_token: the file that manage_token_file names cannot be read"),
        ({"trace_file": "/nowhere/trace"}, "trace_file='/nowhere/trace': its folder does not exist; create the folder"),
        ({"control_file": "/tmp"}, "control_file='/tmp' is a folder; name a file"),  # noqa: S108
        ({"quotas": [{"name": "a", "salt_env": "NOT_SET"}]}, "salt_env"),
        ({"tiers": "redis://h?password_env=NOT_SET"}, "variable that password_env names is empty or not set"),
        ({"tiers": "/var/kv?encryption_key_env=NOT_SET"}, "variable that encryption_key_env names is empty or not set"),
        ({"tiers": "/var/kv?bytes_max=1EiB"}, "disk tier: bytes_max=1EiB is more than the "),
        ({"tiers": "/dev/null/kv"}, "/dev/null is not a folder; name another path"),
    ],
    ids=str,
)
def test_check_refuses_missing_files_and_packages(
    extra: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvpipe check` finds problems that an engine would report only after loading its weights."""
    assert why in _refusal(extra, capsys)


def test_check_refuses_a_socket_whose_folder_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder of the socket is refused.

    A folder whose name contains `{engine}` may be missing, because the engine's name is not known yet.
    """
    token = _token(tmp_path)
    message = _refusal({"manage": f"unix:{tmp_path}/none/{{engine}}.sock", **token}, capsys)
    assert f"the folder {tmp_path}/none does not exist; create it" in message
    for at in (f"unix:{tmp_path}/{{engine}}.sock", f"unix:{tmp_path}/{{engine}}/sock"):
        assert main(["check", json.dumps({"manage": at, **token})]) == 0


def test_check_prints_values_as_people_write_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes have units, paths have no quotes, and a tier is printed with all keys that are set."""
    extra = {"pool_bytes_max": "1.5GiB", "staging_bytes_max": 12345, "tiers": [{"kind": "disk", "path": str(tmp_path)}]}
    assert main(["check", json.dumps(extra | {"chunk_tokens": 100, "trace_file": str(tmp_path / "t")})]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [
        "pool_bytes_max = 1.5GiB", "staging_bytes_max = 12345B", f"trace_file = {tmp_path}/t", "name = (unset)",
        "freeze = false", "quotas = (none)", "chunk_tokens = 100",
    ]  # fmt: skip
    assert [line for line in expected if line not in lines] == []
    (tiers,) = [line for line in lines if line.startswith("tiers = ")]
    assert tiers.startswith("tiers = [{kind: disk, store: all, timeout_ms_max: 2000, lanes: 4, ")
    assert f"path: {tmp_path}, bytes_max: " in tiers
    assert not [line for line in lines if "Posix" in line or "ByteSize" in line]


@pytest.mark.parametrize(("tokens", "block", "shown"), [
    (100, 16, "112 (100, rounded up to blocks of 16)"), (96, 16, "96"),
    (7, 128, "128 (7, rounded up to blocks of 128)"),
])  # fmt: skip
def test_check_shows_the_rounded_chunk_tokens(
    tokens: int, block: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` shows the rounded number that the engine would use."""
    assert main(["check", json.dumps({"chunk_tokens": tokens}), "--block-size", str(block)]) == 0
    assert f"chunk_tokens = {shown}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1 << 20, "1MiB"), (3 << 29, "1.5GiB"), ((1 << 30) + 1, "1073741825B")],
)  # fmt: skip
def test_sizes_in_messages_are_exact(size: int, text: str) -> None:
    """If a remedy says `at least`, its size is exact, so a pool of this size suffices."""
    assert exact_size(size) == text


def test_no_message_names_a_page() -> None:
    """Messages name no page of the documentation, because an installed wheel does not contain the pages."""

    def messages(fields: Any, refused: Any) -> list[str]:
        out = []
        for key in fields:
            try:
                refused(key)
            except ConfigError as error:
                out.append(str(error))
        return out

    kinds: list[tuple[str, type[BaseModel]]] = [
        (kind, plugins.load(plugins.TIERS, kind).made_of) for kind in plugins.own(plugins.TIERS)
    ]  # type: ignore[misc]
    found = messages(Settings.model_fields, lambda key: load_settings({key: [object()]}))
    assert len(found) == len(Settings.model_fields)
    for kind, spec in kinds:
        found += messages(spec.model_fields, lambda key, kind=kind: parse_tier({"kind": kind, key: [object()]}))
    assert [message for message in found if ".md" in message or "](" in message] == []
