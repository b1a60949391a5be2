"""How tiers are configured, and what a user reads when one is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpipe import config_errors, plugins
from kvpipe.config import load_settings
from kvpipe.errors import ConfigError
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.registry import named, parse_tier, parse_tiers, spec_of

KINDS = ["disk", "redis", "s3", "mooncake"]
SPECS = [spec_of(plugins.TIERS, kind) for kind in KINDS]
URLS = ["/mnt/kv", "redis://h:6379/0", "s3://bucket/prefix", "mooncake://h:50051"]
SECRET = "hunter2"  # noqa: S105  (it is looked for in messages)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)


def refusal(value: object) -> str:
    """Return what a user reads, who has set `tiers` to this; it must be one line, and show no secret."""
    with pytest.raises(ConfigError) as caught:
        load_settings({"tiers": value})
    message = str(caught.value)
    assert message.startswith("kvpipe: tier")
    assert "\n" not in message
    assert "Undefined" not in message
    assert SECRET not in message
    return message


def test_every_kind_is_there() -> None:
    """Every kind is registered with a specification, which knows its own kind, and so is at least one of its URLs."""
    assert plugins.own(plugins.TIERS) == KINDS
    assert [spec.model_fields["kind"].default for spec in SPECS] == KINDS
    assert {spec_of(plugins.TIER_URLS, scheme) for scheme in plugins.own(plugins.TIER_URLS)} == set(SPECS)


def test_every_key_is_described() -> None:
    """Every key of every kind has a description of a sentence, and names its unit if it is a number of something."""
    for spec in SPECS:
        for key, field in spec.model_fields.items():
            assert key == "kind" or str(field.description).endswith("."), (spec, key)


@pytest.mark.parametrize(("url", "kind"), zip(URLS, KINDS, strict=True))
def test_a_url_is_enough(url: str, kind: str) -> None:
    """The common case of each kind is one URL."""
    assert parse_tier(url).kind == kind


def test_a_urls_query_holds_further_keys() -> None:
    """Keys in the query are read like those of a table."""
    spec = parse_tier("redis://h:7000/3?lanes=8&store=second_use")
    table = {"kind": "redis", "host": "h", "port": 7000, "db": 3, "lanes": 8, "store": "second_use"}
    assert spec == parse_tier(table)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/mnt/kv", "/mnt/kv"),
        ("/mnt/kv?bytes_max=50GiB", "/mnt/kv"),
        ("file:///mnt/kv?bytes_max=50GiB", "/mnt/kv"),
        ("/mnt/a%20b/#1", "/mnt/a%20b/#1"),
        ("file:///mnt/a%20b", "/mnt/a b"),
        ("~/kv", "/home/me/kv"),
    ],
)
def test_a_path_is_a_disk(text: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute path, or one below a home, is a disk tier there; only in a URL are characters written as %XX."""
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_tier(text).model_dump()["path"] == Path(path)
    assert ("bytes_max" in text) == (parse_tier(text).model_dump()["bytes_max"] == 50 << 30)


TWO: Mapping[str, Any] = {
    "text": " /mnt/kv\n  redis://h ",
    "JSON": '["/mnt/kv", {"kind": "redis", "host": "h"}]',
    "list": ["/mnt/kv", {"kind": "redis", "host": "h"}],
}


@pytest.mark.parametrize("value", TWO.values(), ids=TWO)
@pytest.mark.parametrize("where", ["extra", "environment", "YAML", "YAML named by the environment"])
def test_tiers_can_be_set_anywhere(where: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of URLs, a list, and a list in JSON mean the same in the extra config, the environment and the file."""
    extra: dict[str, Any] = {}
    if where == "extra":
        extra["tiers"] = value
    elif where == "environment":
        monkeypatch.setenv("KVPIPE_TIERS", value if isinstance(value, str) else json.dumps(value))
    else:
        (tmp_path / "file").write_text(json.dumps({"tiers": value}), encoding="utf-8")  # JSON is YAML
        monkeypatch.setenv("KVPIPE_CONFIG_FILE", str(tmp_path / "file"))
        extra |= {"config_file": str(tmp_path / "file")} if where == "YAML" else {}
    got = load_settings(extra).tiers
    assert got == (parse_tier("/mnt/kv"), parse_tier("redis://h"))


@pytest.mark.parametrize("value", ["", "  ", [], "[]"])
def test_no_tiers_are_no_error(value: Any) -> None:
    """Nothing named, nothing used; that is the default too."""
    assert load_settings({"tiers": value}).tiers == load_settings().tiers == ()


def test_the_order_is_kept() -> None:
    """Tiers are asked in the order in which they are named; of one kind, they are distinguished by a number."""
    specs = parse_tiers("redis://a s3://b/p redis://c redis://a/1")
    assert [name for name, _ in named(specs)] == ["redis", "s3", "redis-2", "redis-3"]
    assert tuple(spec for _, spec in named(specs)) == specs


def test_settings_show_every_key_of_a_tier() -> None:
    """`kvpipe check` prints a tier's own keys too, and they can be read back."""
    dumped = load_settings({"tiers": "redis://h:7000"}).model_dump()["tiers"]
    assert dumped[0]["port"] == 7000
    assert parse_tiers(dumped) == parse_tiers("redis://h:7000")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (
            5,
            "tiers is no list but of type int; give one entry per tier: a path such as /mnt/kv or a URL such as redis:",
        ),
        ({"kind": "redis"}, "tiers is no list but of type dict; give "),
        ('{"kind": "redis"}', "tiers is no list but of type dict; give "),
        (
            "[1",
            "tiers begins as JSON but is none (Expecting ',' delimiter at line 1, column 3); mend it, or write",
        ),
        ([5], "tier 1 is of type int; give a path such as /mnt/kv"),
        (["redis://h", None], "tier 2 is of type NoneType; give "),
        ("redis", "tier 1: 'redis' is neither a URL nor an absolute path; write a path such as /mnt/kv or a URL"),
        ("redis://h mnt/kv", "tier 2: 'mnt/kv' is neither a URL nor an absolute path"),
        ("reddis://h", "tier 1: no tier has URLs such as 'reddis://h'; did you mean 'redis://'?"),
        ("ftp://h", "tier 1: no tier has URLs such as 'ftp://h'; URLs begin with file://, redis://, rediss://"),
        ([{}], "tier 1: kind is missing; it is one of disk, redis, s3, mooncake"),
        ([{"kind": "reddis"}], "tier 1: no tier is of kind='reddis'; did you mean 'redis'?"),
        ([{"kind": 7}], "tier 1: no tier is of kind=7; kinds are disk, redis, s3, mooncake"),
        ([{"kind": ["redis"]}], "tier 1: no tier is of kind of type list; kinds are "),
        ("s3://b/p redis://h?lane=5", "tier 2 (redis): unknown key 'lane'; did you mean 'lanes'?"),
        ([{"kind": "redis", "host": "h", "lane": 5}], "tier 1 (redis): unknown key 'lane'; did you mean 'lanes'?"),
        (
            [{"kind": "redis", "host": "h", "qqq": 5}],
            "tier 1 (redis): unknown key 'qqq'; a redis tier has kind, store, ",
        ),
        ([{"kind": "redis", "host": ""}], "tier 1 (redis): host='' is not valid ("),
        ([{"kind": "redis"}], "tier 1 (redis): host is missing; host means: Name or address of the server"),
        ("redis://h?lanes=many", "tier 1 (redis): lanes='many' is not valid (Input should be a valid integer"),
        ("redis://h?lanes=65", "less than or equal to 64); lanes means: Reads, and as many writes"),
        (
            [{"kind": "redis", "host": "h", "lanes": True}],
            "lanes=True is not valid (expected a number, not true or false",
        ),
        ("redis://h?timeout_ms_max=0", "greater than 0); timeout_ms_max means: Longest wait"),
        ("redis://h?store=some", "store='some' is not valid (Input should be 'all', 'second_use' or 'never')"),
        ("redis://h?kind=s3", "tier 1 (redis): 'redis://h': 'kind' is given twice; leave it out of the query"),
        ("redis://h/1?db=2", "tier 1 (redis): 'redis://h/1': 'db' is given twice"),
        ("redis://h?lanes=1&lanes=2", "'lanes' is given twice"),
        ("redis://h?lanes", "tier 1 (redis): 'redis://h' is no valid URL; write "),
        ("redis://h:port", "is no valid URL; write "),
        ("redis://[::1", "is no valid URL; write "),
        ("/mnt/kv /mnt/kv/", "tier 2 (disk) is the same place as tier 1; leave one of them out"),
        ("redis://h s3://b/p redis://h:6379/0?lanes=9", "tier 3 (redis) is the same place as tier 1"),
        ("s3://b/p s3://b/p/", "tier 2 (s3) is the same place as tier 1"),
        ("mooncake://h:1 mooncake://h:1", "tier 2 (mooncake) is the same place as tier 1"),
    ],
)
def test_what_is_wrong_is_named(value: object, wanted: str) -> None:
    """A wrong tier is refused with its place and kind, the key, the value, the reason and the remedy."""
    assert wanted in refusal(value)


@pytest.mark.parametrize(
    "value",
    [
        f"redis://user:{SECRET}@h",
        f"redis://:{SECRET}@h:port",
        f"redis://:p@{SECRET}@[::1",
        f"redis://:{SECRET}?x@h",
        f"redis://h?password={SECRET}",
        f"redis://h?{SECRET}",
        f"reddis://user:{SECRET}@h",
        f"redis:{SECRET}@h",
        f"reddis://h?password={SECRET}",
        f"s3://key:{SECRET}@bucket/prefix",
        f"mooncake://user:{SECRET}@h:1",
        f"file://user:{SECRET}@h/p",
        f"[{SECRET}",
        {"kind": "redis", "host": "h", "password": SECRET},
        json.dumps({"kind": "redis", "host": "h", "password": SECRET}),
        [[f"redis://:{SECRET}@h"]],
        [{"kind": "redis", "host": "h", "password": SECRET}],
        [{"kind": "redis", "host": f"user:{SECRET}@h"}],
        [{"kind": "redis", "host": "h", "encryption_key_env": [SECRET]}],
        [{"kind": "s3", "url": f"s3://key:{SECRET}@bucket/p"}],
        [{"kind": "s3", "url": "s3://bucket/p", "endpoint": f"http://key:{SECRET}@h"}],
        [{"kind": "mooncake", "master": "h:1", "metadata_server": f"http://u:{SECRET}@h"}],
    ],
)
def test_no_message_shows_a_secret(value: object) -> None:
    """Wherever a password is put that does not belong there, the refusal does not repeat it."""
    assert refusal(value)


def test_an_error_of_another_key_shows_no_tier() -> None:
    """A wrong value elsewhere is reported as before."""
    with pytest.raises(ConfigError, match="lookup_ms_max=0 is not valid") as caught:
        load_settings({"tiers": "redis://h", "lookup_ms_max": 0})
    assert "tiers" not in str(caught.value).split(";")[0]


@pytest.mark.parametrize("text", ["a b", "user@", "redis://u@h/0?x#y", "://", "", "@", "x://?"])
def test_a_public_text_has_no_user(text: str) -> None:
    """What is shown of any text ends where a query begins and begins behind an '@'."""
    shown = config_errors.public(text)
    assert "@" not in shown
    assert "://" not in text or "?" not in shown


def test_places_are_keys() -> None:
    """The keys by which two tiers are known to be the same place are keys of their kind."""
    for spec in SPECS:
        assert spec.place
        assert set(spec.place) <= set(spec.model_fields)


def test_tiers_need_no_client_to_be_configured() -> None:
    """Reading a configuration imports no client library."""
    import subprocess
    import sys

    code = (
        "import sys; from kvpipe.config import load_settings; load_settings({'tiers': sys.argv[1]});"
        "print([name for name in ('redis', 'obstore', 'mooncake', 'cryptography', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(URLS)], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_specifications_are_kept_as_they_are() -> None:
    """What was read once is not read again."""
    specs = parse_tiers(URLS)
    assert parse_tiers(specs) == specs
    assert load_settings({"tiers": specs}).tiers == specs
