"""Tests of the sources of settings, and of the messages for wrong settings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvpipe.config.settings import Settings, check_stores, load_settings, markdown_table, parse_extra
from kvpipe.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)


def _yaml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvpipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _refusal(extra: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(extra)
    assert str(caught.value).startswith("kvpipe: ")
    return str(caught.value)


def test_extra_config_wins_over_environment_file_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of precedence is: the extra config, the environment, the file, the defaults."""
    path = _yaml(tmp_path, "chunk_tokens: 1\nwait_ms_max: 1\npolicy: s3fifo\n")
    monkeypatch.setenv("KVPIPE_CHUNK_TOKENS", "2")
    monkeypatch.setenv("KVPIPE_WAIT_MS_MAX", "2")
    got = load_settings({"config_file": path, "chunk_tokens": 3})
    assert (got.chunk_tokens, got.wait_ms_max, got.policy, got.mode) == (3, 2, "s3fifo", "auto")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVPIPE_CONFIG_FILE names a file, as the key config_file does."""
    monkeypatch.setenv("KVPIPE_CONFIG_FILE", _yaml(tmp_path, "mode: step"))
    assert load_settings().mode == "step"


def test_the_environments_case_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a variable's name does not matter: a variable in lower case also takes precedence over the file."""
    monkeypatch.setenv("kvpipe_mode", "layerwise")
    assert load_settings({"config_file": _yaml(tmp_path, "mode: step")}).mode == "layerwise"
    monkeypatch.setenv("kvpipe_moode", "step")
    assert "did you mean 'KVPIPE_MODE'?" in _refusal({})


def test_the_same_call_without_arguments_gives_the_defaults() -> None:
    """A call without arguments returns the default settings."""
    fields = Settings.model_fields
    assert load_settings().model_dump() == {key: field.default for key, field in fields.items()}
    assert load_settings({}) == load_settings(None)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("chunk_sizee", "chunk_tokens"),
        ("chunk_size", "chunk_tokens"),
        ("chunk-tokens", "chunk_tokens"),
        ("pool_bytes", "pool_bytes_max"),
        ("max_pool", "pool"),
        ("POLICY", "policy"),
        ("polcy", "policy"),
        ("freze", "freeze"),
        ("threads", "copy_threads"),
        ("config", "config_file"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, meant: str) -> None:
    """A misspelt key is refused, and the message names the most similar key."""
    assert _refusal({wrong: 1}) == (
        f"kvpipe: unknown key {wrong!r} in the kv_connector_extra_config; did you mean {meant!r}?"
    )


def test_retired_key_is_refused_with_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to use instead, for a retired key and for a retired variable."""
    assert _refusal({"log_format": "json"}).endswith("use vLLM's --logging-config.formatter json")
    monkeypatch.setenv("KVPIPE_LOG_FORMAT", "json")
    assert _refusal({}).endswith("use vLLM's --logging-config.formatter json")


def test_an_unknown_key_like_no_other_lists_all() -> None:
    """A key that resembles no valid key is refused, and the message names all valid keys."""
    message = _refusal({"zzz": 1})
    assert "unknown key 'zzz'" in message
    assert all(key in message for key in Settings.model_fields)


def test_an_unknown_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a wrong variable, the message names a variable as the remedy, not a key."""
    monkeypatch.setenv("KVPIPE_CHUNK_TOKEN", "4")
    assert _refusal({}) == (
        "kvpipe: unknown key 'KVPIPE_CHUNK_TOKEN' in the environment; did you mean 'KVPIPE_CHUNK_TOKENS'?"
    )


SERVICE = {
    "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80", "PORT": "tcp://10.0.0.1:80",
    "PORT_80_TCP": "tcp://10.0.0.1:80", "PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_PORT": "80",
    "PORT_80_TCP_ADDR": "10.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize("service", ["KVPIPE_", "KVPIPE_REDIS_", "KVPIPE_MANAGE_"])
def test_a_service_in_kubernetes_may_have_its_name(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that Kubernetes sets for a service are accepted. Variables that only resemble these are refused."""
    before = load_settings()
    for end, value in SERVICE.items():
        monkeypatch.setenv(service + end, value)
    assert load_settings() == before
    monkeypatch.setenv(service + "PORTS", "80")
    assert f"unknown key '{service}PORTS' in the environment" in _refusal({})
    monkeypatch.delenv(service + "PORTS")
    monkeypatch.delenv(service + "SERVICE_HOST")
    assert "in the environment" in _refusal({})


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    """A wrong key in the YAML file is refused with the file's path."""
    path = _yaml(tmp_path, "chunk_token: 4")
    message = _refusal({"config_file": path})
    assert path in message
    assert "did you mean 'chunk_tokens'?" in message


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("chunk_tokens", "many", "valid integer"),
        ("chunk_tokens", 1.5, "fractional part"),
        ("chunk_tokens", 0, "greater than 0"),
        ("chunk_tokens", True, "expected a number, not true or false"),
        ("pool_bytes_max", True, "expected a number, not true or false"),
        ("pool_bytes_max", "8 parsecs", "byte unit: parsecs"),
        ("pool_bytes_max", -1, "could not parse"),
        ("wait_ms_max", False, "expected a number, not true or false"),
        ("wait_ms_max", 10**13, "less than or equal to 3600000"),
        ("copy_threads", True, "expected a number, not true or false"),
        ("copy_threads", 2, "less than or equal to 1"),
        ("mode", "layer", "'layerwise' or 'step'"),
        ("policy", 3, "'lru', 's3fifo' or 'sessions'"),
        ("save_decode", "perhaps", "valid boolean"),
        ("name", 5, "valid string"),
        ("log_level", None, "'debug'"),
    ],
)
def test_a_wrong_value_names_key_value_and_remedy(key: str, value: object, why: str) -> None:
    """A wrong value is refused. The message has the key, the value, the reason, the key's meaning and its default."""
    message = _refusal({key: value})
    assert f"kvpipe: {key}={value!r} is not valid" in message
    assert why in message
    # the description without its links
    description = re.sub(r" \(\[[^\]]+\]\([^)]+\)\)", "", str(Settings.model_fields[key].description))
    assert f"{key} means: {description}" in message
    assert "Default: " in message
    assert "Value error" not in message


def test_pool_dir_is_refused_when_it_is_too_long_for_a_socket() -> None:
    """The path of a Unix socket has at most about 100 bytes, and the socket is in this folder."""
    load_settings({"pool_dir": "/" + "x" * 87})
    message = _refusal({"pool_dir": "/" + "x" * 88})
    assert "kvpipe: pool_dir='/xxx" in message
    assert "expected a path of at most 88 bytes" in message


def test_a_wrong_variable_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value of an environment variable gets the same message as a wrong value of a key."""
    monkeypatch.setenv("KVPIPE_CHUNK_TOKENS", "many")
    assert "chunk_tokens='many' is not valid" in _refusal({})


def test_a_huge_value_does_not_flood_the_message() -> None:
    """The message shows only the beginning of a long value, so that the message stays readable."""
    assert len(_refusal({"chunk_tokens": "9" * 5000})) < 400


def test_a_contradiction_is_refused() -> None:
    """The refusal of `bypass` together with `freeze` names both keys and the remedy."""
    message = _refusal({"bypass": True, "freeze": True})
    assert "bypass=true contradicts freeze=true" in message
    assert "set only one of them" in message
    assert load_settings({"bypass": True}).bypass
    assert load_settings({"freeze": True}).freeze


def test_producer_is_refused_when_a_tier_stores_at_the_second_use_only() -> None:
    """A producer loads nothing, so it never uses a chunk a second time, and would store nothing.

    The message has tier, field, value, role and remedy.
    """
    settings = load_settings({"tiers": ["/mnt/kv", "redis://h?store=second_use"]})
    with pytest.raises(ConfigError) as caught:
        check_stores(settings, loads=False)
    assert str(caught.value) == (
        "kvpipe: tier 2 (redis): store='second_use' would store nothing with kv_role='kv_producer' (it loads no chunk, "
        "so it uses none a second time); set store='all', or kv_role='kv_both'"
    )
    check_stores(settings, loads=True)
    check_stores(load_settings({"tiers": ["/mnt/kv", "redis://h?store=never"]}), loads=False)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: [1", "cannot be read"),
        (b"- mode\n", "holds a list"),
        (b"[]", "holds a list"),
        (b"word", "holds a str"),
        (b"\xff\xfe\x00mode", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_names_the_file_and_the_remedy(tmp_path: Path, content: bytes | None, why: str) -> None:
    """A file that does not exist, is no YAML, no text or no mapping raises a ConfigError with the remedy."""
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    message = _refusal({"config_file": str(path)})
    assert f"config_file={str(path)!r}" in message
    assert why in message
    assert "YAML file of keys" in message or "'key: value' per line" in message


@pytest.mark.parametrize(
    "text",
    [
        "freeze: true\nmode: step\nfreeze: false\n",
        'tiers:\n- {path: /a, "path": /b, kind: disk}\n',
        "{mode: step, mode: auto}",
    ],
)
def test_a_key_that_is_given_twice_in_the_file_is_refused(tmp_path: Path, text: str) -> None:
    """Without the refusal, the last value of the key would silently replace the first value."""
    path = _yaml(tmp_path, text)
    message = _refusal({"config_file": path})
    key = next(key for key in ("freeze", "path", "mode") if text.count(f"{key}") > 1)
    assert message == f"kvpipe: config_file={path!r}: the key {key!r} is given twice; keep one of them"


def test_a_key_that_is_given_twice_in_json_is_refused() -> None:
    """`kvpipe check` refuses a key that is given twice, although vLLM's own reader silently keeps the last value."""
    for extra in ('{"freeze": true, "mode": "step", "freeze": false}', '{"tiers": [{"freeze": 1, "freeze": 2}]}'):
        with pytest.raises(ConfigError, match=r"^kvpipe: extra: the key 'freeze' is given twice; keep one of them$"):
            parse_extra(extra)
    for text in ('[{"kind": "disk", "path": "/a", "path": "/b"}]', '{"kind": "disk", "path": "/a", "path": "/b"}'):
        with pytest.raises(ConfigError, match=r"^kvpipe: tiers: the key 'path' is given twice; keep one of them$"):
            load_settings({"tiers": text})
    with pytest.raises(ConfigError, match=r"^kvpipe: quotas: the key 'share' is given twice; keep one of them$"):
        load_settings({"quotas": '[{"name": "others", "share": 0.1, "share": 0.2}]'})
    assert parse_extra('{"tiers": [{"kind": 1}, {"kind": 1}]}') == {"tiers": [{"kind": 1}, {"kind": 1}]}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """An empty YAML file is not an error."""
    given = load_settings({"config_file": _yaml(tmp_path, "")})
    assert given.model_dump(exclude={"config_file"}) == load_settings().model_dump(exclude={"config_file"})


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1GB", 10**9), ("4096", 4096), (4096, 4096)]
)
def test_byte_sizes_take_units(text: str | int, size: int) -> None:
    """`pool_bytes_max` accepts a number of bytes, with a binary unit, a decimal unit or none."""
    assert load_settings({"pool_bytes_max": text}).pool_bytes_max == size


def test_settings_are_frozen() -> None:
    """Settings cannot be changed while an engine runs."""
    with pytest.raises(ValueError, match="frozen"):
        load_settings().chunk_tokens = 5


def test_the_table_has_a_row_per_key() -> None:
    """The table has every key with its default."""
    lines = markdown_table().splitlines()
    assert len(lines) == 2 + len(Settings.model_fields)
    assert any(line.startswith("| `pool_bytes_max` | `4.0GiB` |") for line in lines)
