"""Tests of the configuration of tiers, and of the messages for a wrong tier."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.errors import ConfigError
from kvpipe.inputs import config_errors, plugins
from kvpipe.machine import mounts
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
    """Return the message for a wrong value of `tiers`. The message must be one line and show no secret."""
    with pytest.raises(ConfigError) as caught:
        load_settings({"tiers": value})
    message = str(caught.value)
    assert message.startswith("kvpipe: tier")
    assert "\n" not in message
    assert "Undefined" not in message
    assert SECRET not in message
    return message


def test_every_kind_is_registered() -> None:
    """Every kind is registered with the specification of this kind. Each kind has at least one URL scheme."""
    assert plugins.own(plugins.TIERS) == KINDS
    assert [spec.model_fields["kind"].default for spec in SPECS] == KINDS
    assert {spec_of(plugins.TIER_URLS, scheme) for scheme in plugins.own(plugins.TIER_URLS)} == set(SPECS)


def test_every_key_is_described() -> None:
    """Every key of every kind has a description. The name of a number with a unit contains the unit."""
    for spec in SPECS:
        for key, field in spec.model_fields.items():
            assert key == "kind" or str(field.description).endswith("."), (spec, key)


@pytest.mark.parametrize(("url", "kind"), zip(URLS, KINDS, strict=True))
def test_a_url_is_enough(url: str, kind: str) -> None:
    """For the usual configuration of each kind of tier, one URL suffices."""
    assert parse_tier(url).kind == kind


def test_a_urls_query_holds_further_keys() -> None:
    """Keys in a URL's query are read like keys of a table."""
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
    """An absolute path, or a path below a home folder, is a disk tier. `%XX` stands for a character only in a URL."""
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
        (tmp_path / "file").write_text(json.dumps({"tiers": value}), encoding="utf-8")  # every JSON text is YAML, too
        monkeypatch.setenv("KVPIPE_CONFIG_FILE", str(tmp_path / "file"))
        extra |= {"config_file": str(tmp_path / "file")} if where == "YAML" else {}
    got = load_settings(extra).tiers
    assert got == (parse_tier("/mnt/kv"), parse_tier("redis://h"))


@pytest.mark.parametrize("value", ["", "  ", [], "[]"])
def test_no_tiers_are_no_error(value: Any) -> None:
    """An empty list of tiers, which is also the default, is accepted."""
    assert load_settings({"tiers": value}).tiers == load_settings().tiers == ()


def test_the_order_is_kept() -> None:
    """Tiers are asked in the order in which they are configured. Several tiers of one kind get numbers."""
    specs = parse_tiers("redis://a s3://b/p redis://c redis://a/1")
    assert [name for name, _ in named(specs)] == ["redis", "s3", "redis-2", "redis-3"]
    assert tuple(spec for _, spec in named(specs)) == specs


def test_settings_show_every_key_of_a_tier() -> None:
    """`kvpipe check` prints all keys of a tier, and its output can be parsed again."""
    dumped = load_settings({"tiers": "redis://h:7000"}).model_dump()["tiers"]
    assert dumped[0]["port"] == 7000
    assert parse_tiers(dumped) == parse_tiers("redis://h:7000")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (
            5,
            "tiers is of type int, not a list; give one entry per tier: a path such as /mnt/kv or a URL such as redis:",
        ),
        ({"kind": "redis"}, "tiers is of type dict, not a list; give "),
        ('{"kind": "redis"}', "tiers is of type dict, not a list; give "),
        (
            "[1",
            "tiers begins as JSON but is not valid (Expecting ',' delimiter at line 1, column 3); correct it, or give",
        ),
        ([5], "tier 1 is of type int; give a path such as /mnt/kv"),
        (["redis://h", None], "tier 2 is of type NoneType; give "),
        ("redis", "tier 1: 'redis' is neither a URL nor an absolute path; write a path such as /mnt/kv or a URL"),
        ("redis://h mnt/kv", "tier 2: 'mnt/kv' is neither a URL nor an absolute path"),
        ("reddis://h", "tier 1: 'reddis://h' has a scheme that no tier has; did you mean 'redis://'?"),
        ("ftp://h", "tier 1: 'ftp://h' has a scheme that no tier has; URLs begin with file://, redis://, rediss://"),
        ([{}], "tier 1: kind is missing; it is one of disk, redis, s3, mooncake"),
        ([{"kind": "reddis"}], "tier 1: kind='reddis' is not a kind of tier; did you mean 'redis'?"),
        ([{"kind": 7}], "tier 1: kind=7 is not a kind of tier; kinds are disk, redis, s3, mooncake"),
        ([{"kind": ["redis"]}], "tier 1: kind of type list is not a kind of tier; kinds are "),
        ("s3://b/p redis://h?lane=5", "tier 2 (redis): unknown key 'lane'; did you mean 'lanes'?"),
        ([{"kind": "redis", "host": "h", "lane": 5}], "tier 1 (redis): unknown key 'lane'; did you mean 'lanes'?"),
        (
            [{"kind": "redis", "host": "h", "qqq": 5}],
            "tier 1 (redis): unknown key 'qqq'; a redis tier has kind, store, ",
        ),
        ([{"kind": "redis", "host": ""}], "tier 1 (redis): host='' is not valid ("),
        ([{"kind": "redis"}], "tier 1 (redis): host is missing; host means: Name or address of the server"),
        ("redis://h?lanes=many", "tier 1 (redis): lanes='many' is not valid (Input should be a valid integer"),
        ("redis://h?lanes=65", "less than or equal to 64); lanes means: Number of reads"),
        (
            [{"kind": "redis", "host": "h", "lanes": True}],
            "lanes=True is not valid (expected a number, not true or false",
        ),
        ("redis://h?timeout_ms_max=0", "greater than 0); timeout_ms_max means: Longest wait"),
        ("redis://h?store=some", "store='some' is not valid (Input should be 'all', 'second_use' or 'never')"),
        ("redis://h?kind=s3", "tier 1 (redis): 'redis://h': 'kind' is given twice; leave it out of the query"),
        ("redis://h/1?db=2", "tier 1 (redis): 'redis://h/1': 'db' is given twice"),
        ("redis://h?lanes=1&lanes=2", "'lanes' is given twice"),
        ("redis://h?lanes", "tier 1 (redis): 'redis://h' is not a valid URL; write "),
        ("redis://h:port", "is not a valid URL; write "),
        ("redis://[::1", "is not a valid URL; write "),
        ("/mnt/kv /mnt/kv/", "tier 2 (disk) is the same store as tier 1; remove one of them"),
        ("redis://h s3://b/p redis://h:6379/0?lanes=9", "tier 3 (redis) is the same store as tier 1"),
        ("s3://b/p s3://b/p/", "tier 2 (s3) is the same store as tier 1"),
        ("mooncake://h:1 mooncake://h:1", "tier 2 (mooncake) is the same store as tier 1"),
    ],
)
def test_refusal_names_the_tier_the_key_and_the_remedy(value: object, wanted: str) -> None:
    """The message names the tier by its place and kind, the wrong key and its value, the reason and the remedy."""
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
    """A password in a wrong place is not repeated in the message."""
    assert refusal(value)


def test_an_error_of_another_key_shows_no_tier() -> None:
    """A wrong value of another key is refused, and the message shows no tier."""
    with pytest.raises(ConfigError, match="lookup_ms_max=0 is not valid") as caught:
        load_settings({"tiers": "redis://h", "lookup_ms_max": 0})
    assert "tiers" not in str(caught.value).split(";")[0]


@pytest.mark.parametrize("text", ["a b", "user@", "redis://u@h/0?x#y", "://", "", "@", "x://?"])
def test_a_public_text_has_no_user(text: str) -> None:
    """In messages, the text of a URL begins after the last '@' and ends before the query."""
    shown = config_errors.public_url(text)
    assert "@" not in shown
    assert "://" not in text or "?" not in shown


def test_place_names_keys_of_its_kind() -> None:
    """The keys in `place` of each kind are keys of this kind."""
    for spec in SPECS:
        assert spec.place
        assert set(spec.place) <= set(spec.model_fields)


def test_reading_a_tier_configuration_imports_no_client_library() -> None:
    """Reading a configuration imports no client library."""
    import subprocess
    import sys

    code = (
        "import sys; from kvpipe.config.settings import load_settings; load_settings({'tiers': sys.argv[1]});"
        "print([name for name in ('redis', 'obstore', 'mooncake', 'cryptography', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(URLS)], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_specifications_are_kept_as_they_are() -> None:
    """Tiers that are already specifications are used as they are, without parsing."""
    specs = parse_tiers(URLS)
    assert parse_tiers(specs) == specs
    assert load_settings({"tiers": specs}).tiers == specs


MOUNTS = """\
22 27 0:21 / /proc rw - proc proc rw
27 0 8:1 / / rw - ext4 /dev/sda1 rw
30 27 0:50 / /mnt rw shared:1 - nfs4 server:/export rw
31 30 8:2 / /mnt/nvme rw - xfs /dev/nvme0n1 rw
32 27 0:51 / /data\\040set rw - fuse.juicefs store rw
33 27 0:52 / /odd rw - fuse.unheard_of odd rw
34 27 8:3 / /again rw - ext4 /dev/sdb1 rw
35 27 0:53 / /again rw - ceph mons:/ rw
cut off
"""


@pytest.mark.parametrize(
    ("folder", "local"),
    [("/var/kv", True), ("/mnt/kv", False), ("/mnt/nvme/kv", True), ("/mntx", True), ("/data set/kv", False),
     ("/odd/kv", None), ("/again/kv", False)],
)  # fmt: skip
def test_a_folder_is_local_if_no_other_host_sees_its_file_system(
    tmp_path: Path, folder: str, *, local: bool | None
) -> None:
    """The mount with the longest matching path counts. If several mounts have this path, the last one counts."""
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert mounts.is_on_this_host(Path(folder), tmp_path / "mountinfo") is local


def test_a_folder_is_of_unknown_locality_when_mounts_cannot_be_read(tmp_path: Path) -> None:
    """Without `/proc` the locality of a folder is unknown."""
    assert mounts.is_on_this_host(tmp_path, tmp_path / "none") is None


def test_the_locality_of_a_tier_is_found_or_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are remote. A folder has the locality of its file system, unless `announce` sets another locality."""
    (tmp_path / "mountinfo").write_text("27 0 8:1 / / rw - ext4 /dev/sda1 rw")
    monkeypatch.setattr(mounts.is_on_this_host, "__defaults__", (tmp_path / "mountinfo",))
    urls = [str(tmp_path / "not" / "there"), *URLS[1:]]
    assert [parse_tier(url).locality for url in urls] == ["local", "remote", "remote", "remote"]
    assert {parse_tier({"kind": "disk", "path": urls[0], "announce": "remote"}).locality} == {"remote"}
    assert parse_tier("redis://h:6379/0?announce=local").locality == "local"
    assert "announce" in refusal(["redis://h:6379/0?announce=no"])
