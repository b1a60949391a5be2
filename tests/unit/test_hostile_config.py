"""Any configuration is either accepted, or refused with one sentence that shows no secret."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpipe.cli import main as cli
from kvpipe.config.settings import Settings, load_settings, parse_extra
from kvpipe.errors import ConfigError, UsageError
from kvpipe.inputs import plugins
from kvpipe.tiers.registry import named, spec_of

SECRET = "Hunter2Hunter2"  # noqa: S105  (it is looked for in messages; it is short enough to be shown whole)
SENTENCE_CHARS_MAX = 2000


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)


def deep(levels: int) -> list[Any]:
    """Return a list in a list in a list, and so on."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def cyclic() -> dict[str, Any]:
    """Return a table that contains itself."""
    made: dict[str, Any] = {"kind": "redis"}
    made["host"] = made
    return made


def bomb() -> list[Any]:
    """Return a small object that has 10**9 elements when it is written out."""
    made: list[Any] = ["x"]
    for _ in range(9):
        made = [made] * 10
    return made


NASTY: dict[str, Any] = {
    "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "-0": -0.0, "1e308": 1e308,
    "huge": 10**5000, "-huge": -(10**5000), "2**63": 1 << 63, "2**64": 1 << 64, "-1": -1,
    "huge text": "9" * 5000, "huge size": "9" * 400 + "GiB", "huge unit": "1" + "x" * 100_000,
    "long": "x" * 1_000_000, "long path": "/" + "x/" * 4000, "long name": "/" + "x" * 5000,
    "NUL": "a\0b", "NUL path": "/a\0b", "~NUL": "~a\0b", "surrogate": "\ud800", "surrogate path": "/\udcff/x",
    "lines": "a\nb\r\n\x1b[31mc", "empty": "", "blank": " ", "~": "~nobody-is-called-so", "percent": "%s%n{0}",
    "bytes": b"\xff\xfe", "None": None, "True": True, "[]": [], "{}": {}, "set": {1, 2}, "tuple key": {(1, 2): 3},
    "object": object(), "deep": deep(900), "cycle": cyclic(), "bomb": bomb(), "[[]]": [[]], "[None]": [None],
    "kind bomb": [{"kind": bomb()}], "kind NUL": [{"kind": "redis", "host": "\0"}], "cyclic tier": [cyclic()],
    "huge port": [{"kind": "redis", "host": "h", "port": 10**5000}], "huge db": "redis://h/" + "9" * 5000,
    "port": "redis://h:99999999999999999999", "idna": "redis://" + "a" * 70 + ".example", "fullwidth": "redis://h\uff1a1",
    "unicode": "redis://\u2100", "[json": "[" * 100_000, "{json": '{"a":' * 100_000, "[9": f"[{'9' * 5000}]",
    "file NUL": "file:///a%00b", "file surrogate": "file:///%ff", "two dots": "s3://b/../..", "az": "az://", "gs": "gs://",
    "mooncake": "mooncake://h:999999", "mooncake deep": [{"kind": "mooncake", "master": deep(900)}],
    "nan tier": [{"kind": "disk", "path": "/x", "bytes_max": float("nan")}],
    "inf tier": [{"kind": "disk", "path": "/x", "bytes_max": float("inf")}],
    "NUL tier": [{"kind": "disk", "path": "/x\0"}], "many": ["/x"] * 10_000,
}  # fmt: skip
"""Values that no careful user writes, but that a configuration file may contain."""


def refused(load: Callable[[], object]) -> str:
    """Return the message with which `load` refuses its argument, or "" if `load` accepts it."""
    try:
        load()
    except UsageError as error:
        message = str(error)
        assert message.startswith("kvpipe: ")
        assert message.isprintable(), "one line, and nothing that a terminal would obey"
        assert len(message) <= SENTENCE_CHARS_MAX
        assert SECRET not in message
        return message
    return ""


@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_every_key_takes_any_value(value: Any) -> None:
    """Every key of the extra config accepts a nasty value, or refuses the value in one printable sentence."""
    for key in Settings.model_fields:
        message = refused(lambda key=key: load_settings({key: value}))  # type: ignore[misc]
        assert not message or key in message or key == "tiers"


@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_every_key_of_a_tier_takes_any_value(value: Any) -> None:
    """Every key of every kind of tier accepts a nasty value, or refuses the value in one printable sentence."""
    good = {"redis": {"host": "h"}, "disk": {"path": "/x"}, "s3": {"url": "s3://b/p"}, "mooncake": {"master": "h:1"}}
    for kind, given in good.items():
        for key in spec_of(plugins.TIERS, kind).model_fields:
            table = {"kind": kind, **given, key: value}
            refused(lambda table=table: load_settings({"tiers": [table]}))  # type: ignore[misc]


@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_keys_may_be_anything(value: Any) -> None:
    """A nasty value in the place of a key is refused, in the extra config and in a tier."""
    try:
        hash(value)
    except TypeError:
        return
    assert refused(lambda: load_settings({value: 1}))
    assert refused(lambda: load_settings({"tiers": [{"kind": "redis", "host": "h", value: 1}]}))


@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_variables_take_any_text(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every environment variable accepts or refuses any text that the system allows in variables."""
    if not isinstance(value, str) or "\0" in value or len(value) > 100_000 or "\ud800" in value:
        return
    for key in Settings.model_fields:
        with monkeypatch.context() as patch:
            patch.setenv(f"KVPIPE_{key.upper()}", value)
            refused(load_settings)


FILES: dict[str, bytes] = {
    "open list": b"a: [1", "tag": b"!!python/object/apply:os.system [ls]", "unhashable": b"? [a, b]\n: 1",
    "bomb": b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 122)),
    "cycle": b"tiers: &a [*a]", "cyclic key": b"&a ? *a : 1", "deep": b"tiers: " + b"[" * 100_000,
    "deep map": b"{a: " * 20_000, "huge": b"chunk_tokens: " + b"9" * 5000, "date": b"name: 2001-99-99",
    "binary": b"mode: !!binary '!'", "float": b"trace_sample: .nan", "inf": b"pool_bytes_max: .inf",
    "time": b"mode: 99999999:59:59", "merge": b"<<: 5", "two": b"a: 1\n---\nb: 2", "NUL": b"name: a\0b",
    "bell": b"name: \x07", "large": b"# " + b"x" * (2 << 20), "surrogate": rb'name: "\ud800"', "tab": b"\tname: x",
    "omap": b"!!omap [1]", "set": b"!!set {name, mode}", "int": b"!!int x", "timestamp": b"!!timestamp x",
    "null": b"~: 1", "number": b"1: 1", "list": b"- a", "text": b"a", "alias": b"*a", "json": b'{"mode": "step"',
}  # fmt: skip


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_broken_yaml_file_is_refused_without_its_content(text: bytes, tmp_path: Path) -> None:
    """A YAML file that is broken, huge, a bomb, or of odd types is refused with its path, but without its content."""
    path = tmp_path / "kvpipe.yaml"
    path.write_bytes(text)
    message = refused(lambda: load_settings({"config_file": str(path)}))
    assert message
    assert str(path) in message or "is not valid" in message


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "absent", "locked"])
def test_folder_pipe_and_device_are_not_read(kind: str, tmp_path: Path) -> None:
    """A folder, a pipe without a writer, and an endless device are refused at once."""
    path = tmp_path / "kvpipe.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "locked":
        path = Path("/proc/self/mem")
    assert f"config_file={str(path)!r} cannot be read (" in refused(lambda: load_settings({"config_file": str(path)}))


EXTRAS = {
    "broken": f'{{"tiers": "redis://:{SECRET}@h"', "list": f'["{SECRET}"]', "text": f'"{SECRET}"', "word": SECRET,
    "deep": "[" * 100_000, "huge": f'{{"chunk_tokens": {"9" * 5000}}}', "nan": '{"chunk_tokens": NaN}', "empty": "",
    "inf": '{"pool_bytes_max": Infinity}', "NUL": "\0", "surrogate": '{"name": "\\ud800"}', "key": '{"\\ud800\\n": 1}',
}  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_extra_is_any_text(extra: str) -> None:
    """`kvpipe check` and `kvpipe doctor` refuse bad extra config with one sentence that does not repeat the config."""
    assert refused(lambda: load_settings(parse_extra(extra)))


# ---- secrets --------------------------------------------------------------------------------------------------------

PRESIGNED = f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}"
LEAKS: dict[str, dict[str, Any]] = {
    "S3 query": {"tiers": f"s3://bucket/prefix?X-Amz-Signature={SECRET}"},
    "S3 table": {"tiers": [{"kind": "s3", "url": f"s3://bucket/prefix?X-Amz-Signature={SECRET}"}]},
    "S3 web": {"tiers": PRESIGNED},
    "S3 web table": {"tiers": [{"kind": "s3", "url": PRESIGNED}]},
    "S3 endpoint": {"tiers": [{"kind": "s3", "url": "s3://b/p", "endpoint": PRESIGNED}]},
    "S3 endpoint, http": {"tiers": [{"kind": "s3", "url": "s3://b/p", "endpoint": f"http://{SECRET}:x@h"}]},
    "S3 path": {"tiers": [{"kind": "s3", "url": f"s3://b/..?k={SECRET}"}]},
    "no scheme": {"tiers": f"bucket/x?X-Amz-Signature={SECRET}"},
    "redis path": {"tiers": f"redis://h/{SECRET}"},
    "redis path, TLS": {"tiers": f"rediss://h:6379/0/{SECRET}"},
    "redis port": {"tiers": f"redis://h:{SECRET}"},
    "redis port, user": {"tiers": f"redis://user:{SECRET}/0"},
    "redis slashes": {"tiers": f"redis:/h/{SECRET}"},
    "redis no slashes": {"tiers": f"redis:{SECRET}"},
    "redis misspelt": {"tiers": f"reddis://h/{SECRET}"},
    "redis db": {"tiers": [{"kind": "redis", "host": "h", "db": SECRET}]},
    "redis db, query": {"tiers": f"redis://h?db={SECRET}"},
    "redis host, path": {"tiers": [{"kind": "redis", "host": f"h/{SECRET}"}]},
    "redis user": {"tiers": f"redis://{SECRET}@h"},
    "redis user, table": {"tiers": [{"kind": "redis", "host": "h", "username": SECRET}]},
    "redis user, list": {"tiers": [{"kind": "redis", "host": "h", "username": [SECRET]}]},
    "redis hosts": {"tiers": [{"kind": "redis", "host": "h", "cluster": True, "cluster_hosts": f"a:{SECRET}@b"}]},
    "S3 twice": {"tiers": f"s3://bucket/{SECRET}?url=x"},
    "mooncake path": {"tiers": f"mooncake://h:1/{SECRET}"},
    "redis host": {"tiers": [{"kind": "redis", "host": f"h?password={SECRET} x"}]},
    "redis list": {"tiers": [{"kind": "redis", "host": ["h", SECRET]}]},
    "redis table": {"tiers": [{"kind": "redis", "host": {"name": "h", "password": SECRET}}]},
    "mooncake": {"tiers": [{"kind": "mooncake", "master": f"u:{SECRET}@h:1"}]},
    "mooncake metadata": {"tiers": [{"kind": "mooncake", "master": "h:1", "metadata_server": f"http://h/?t={SECRET}"}]},
    "password_env": {"tiers": [{"kind": "redis", "host": "h", "password_env": SECRET}]},
    "password_env, odd": {"tiers": [{"kind": "redis", "host": "h", "password_env": f"{SECRET}!"}]},
    "password_env, number": {"tiers": [{"kind": "redis", "host": "h", "password_env": {"x": SECRET}}]},
    "password_env, URL": {"tiers": f"redis://h?password_env={SECRET}"},
    "access_key_env": {"tiers": [{"kind": "s3", "url": "s3://b", "access_key_env": SECRET, "secret_key_env": SECRET}]},
    "encryption_key_env": {"tiers": [{"kind": "disk", "path": "/x", "encryption_key_env": SECRET}]},
    "config_file": {"config_file": PRESIGNED},
    "config_file, user": {"config_file": f"https://me:{SECRET}@host/kvpipe.yaml"},
    "config_file, table": {"config_file": {"password": SECRET}},
    "config_file, list": {"config_file": [SECRET]},
    **{key: {key: f"https://me:{SECRET}@host/x?y={SECRET}"} for key in Settings.model_fields},
    **{f"{key}, table": {key: {"password": SECRET}} for key in Settings.model_fields},
    **{f"{key}, list": {key: [[SECRET]]} for key in Settings.model_fields},
}  # fmt: skip
"""Places in which users write secrets, although they should not."""


@pytest.mark.parametrize("extra", LEAKS.values(), ids=LEAKS)
def test_no_secret_is_repeated(extra: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No secret is in a refusal, an error of making the tier, `repr`, or the output of `kvpipe check`."""

    def load() -> None:
        settings = load_settings(extra)
        assert SECRET not in repr(settings)
        assert SECRET not in str(settings)
        for name, spec in named(settings.tiers):
            assert SECRET not in repr(spec)
            refused(lambda name=name, spec=spec: _made(name, spec))  # type: ignore[misc]

    refused(load)
    cli.main(["check", json.dumps(extra)])
    path = tmp_path / "kvpipe.yaml"
    path.write_text(yaml.safe_dump(extra), encoding="utf-8")
    refused(lambda: load_settings({"config_file": str(path)}))
    path.write_text(f"password: {SECRET}: [\n", encoding="utf-8")
    refused(lambda: load_settings({"config_file": str(path)}))
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err


def _made(name: str, spec: Any) -> None:
    from kvpipe.tiers.guard import GuardedTier

    GuardedTier(name, spec, spec.make(name, writes=False), ())


def test_the_examination_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvpipe doctor` shows no secret, whether the configuration is right or wrong."""
    from kvpipe.cli.doctor import checks as doctor

    monkeypatch.setattr(doctor, "CHECKS", [])
    monkeypatch.setattr(doctor, "TIERS", [check for check in doctor.TIERS if check.name == "tiers"])
    for extra in LEAKS.values():
        assert SECRET not in repr(doctor.examine_extra(json.dumps(extra)))
    assert SECRET not in repr(doctor.examine_extra(f'{{"tiers": "{SECRET}"'))


def test_a_wrong_command_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """A command fails because of its configuration, or has a secret in a tier.

    The command's status is 2, and no secret is shown.
    """
    assert cli.main(["check", f'{{"tiers": "redis://:{SECRET}@h"']) == 2
    assert cli.main(["cache", "stats", f"s3://b/p?X-Amz-Signature={SECRET}"]) == 2
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_names_of_variables_are_shown_where_they_are_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvpipe check` shows the name of a variable that is set.

    If the variable is not set, its name may be the password itself, so the name is not shown.
    """
    monkeypatch.setenv("KV_PASSWORD", SECRET)
    assert cli.main(["check", '{"tiers": "redis://h?password_env=KV_PASSWORD"}']) == 0
    assert "KV_PASSWORD" in capsys.readouterr().out
    assert cli.main(["check", f'{{"tiers": "redis://h?password_env={SECRET}"}}']) == 2
    assert SECRET not in "".join(capsys.readouterr())
    (spec,) = load_settings({"tiers": f"redis://h?password_env={SECRET}"}).tiers
    with pytest.raises(ConfigError, match="password: the environment variable that password_env names is empty"):
        spec.make("redis")
