"""If `kvpipe cache verify` or `purge` finds values that cannot be judged, it deletes no values and has status 2."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpipe.testing.buffers import some_key
from kvpipe.tiers.base import ALIGN_BYTES, Key
from kvpipe.tiers.envelope import HEADER_BYTES
from tests.cli.test_cache import BODY, KEYS, ONE, TWO, Stated, file_of, fill, flip
from tests.cli.test_purge import first_format, later_format
from tests.rigs.servers.redis import serving
from tests.rigs.servers.sockets import LOCAL

OTHERS = [some_key(i, "5" * 32) for i in range(5)]


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Stated:
    """Return an object that runs the command and keeps its output."""
    return Stated(capsys)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of a disk tier that holds KEYS, encrypted with the key that GOOD_KEY names."""
    monkeypatch.setenv("GOOD_KEY", base64.b64encode(bytes(range(32))).decode())
    monkeypatch.setenv("OTHER_KEY", base64.b64encode(bytes(32)).decode())
    fill(f"{tmp_path}/kv?bytes_max=1GiB&encryption_key_env=GOOD_KEY")
    return str(tmp_path / "kv")


def held(path: str) -> dict[str, bytes]:
    """Return every file of the tier's folder except the account."""
    return {str(one): one.read_bytes() for one in Path(path).rglob("*-g*") if one.is_file()}


@pytest.mark.parametrize(
    ("query", "why"),
    [("", "encrypted: name the key"), ("?encryption_key_env=OTHER_KEY", "another encryption key: name")],
)
@pytest.mark.parametrize("command", [["verify"], ["purge", "--all"], ["purge", "--older-than", "0s"]])
def test_encrypted_values_are_kept_when_their_key_is_not_named(
    command: list[str], query: str, why: str, cache: Stated, disk: str
) -> None:
    """With and without `--delete` all values are kept. The message has the remedy."""
    before = held(disk)
    for arguments in (command, [*command, "--delete"]):
        assert cache(*arguments, disk + query) == 2
        assert f"10 values cannot be judged, so nothing is deleted. {why}" in cache.err
        assert why in cache.out
        assert held(disk) == before
    found = cache.json(*command, "--delete", disk + query, status=2)
    assert cache.plan is None
    spaces = {one["namespace"]: one["items"] for one in found["unjudged_namespaces"]}
    assert spaces == {ONE: 5, TWO: 5}
    assert found.get("deleted", found.get("dropped", 0)) == 0


@pytest.mark.parametrize("command", [["verify"], ["purge", "--all"]])
def test_encrypted_values_on_a_server_are_kept_when_their_key_is_not_named(
    command: list[str], cache: Stated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command decides which values are deleted, not the tier.

    So a server's values are kept like a disk's values.
    """
    monkeypatch.setenv("GOOD_KEY", base64.b64encode(bytes(range(32))).decode())
    with serving("redis") as server:
        where = f"redis://{LOCAL}:{server.port}"
        fill(f"{where}?encryption_key_env=GOOD_KEY")
        assert cache(*command, "--delete", where) == 2
        assert "encrypted: name the key" in cache.err
        assert cache.json("verify", f"{where}?encryption_key_env=GOOD_KEY")["good"] == len(KEYS)


def of_a_newer_version(file: Path, key: Key) -> None:
    """Replace a value by a value of a later version."""
    file.write_bytes(later_format(key, bytes(BODY)))


def of_another_layout(file: Path, _: Key) -> None:
    """Change only the version number.

    So the checksum is wrong, as it would be for a later version with another layout.
    """
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(b"\3\0")


def of_an_older_version(file: Path, key: Key) -> None:
    """Replace a value by a value of the first version."""
    file.write_bytes(first_format(key, bytes(BODY)))


def of_an_unknown_envelope(file: Path, _: Key) -> None:
    """Replace a value by bytes of another program."""
    file.write_bytes(b"another tool's file".ljust(HEADER_BYTES + BODY, b"."))


def of_another_namespace(file: Path, key: Key) -> None:
    """Replace a value by a value of another namespace, as if that value's file had been moved."""
    other = next(one for one in KEYS if one.namespace != key.namespace)
    shutil.copyfile(file_of(str(file.parents[2]), other), file)


STRANGE: list[tuple[Callable[[Path, Key], None], str]] = [
    (of_a_newer_version, "newer version"),
    (of_another_layout, "newer version"),
    (of_an_older_version, "older version"),
    (of_an_unknown_envelope, "unknown format"),
    (of_another_namespace, "another namespace"),
]


@pytest.mark.parametrize(("change", "why"), STRANGE)
def test_values_that_cannot_be_judged_are_kept(
    change: Callable[[Path, Key], None], why: str, cache: Stated, tmp_path: Path
) -> None:
    """A single value that cannot be judged prevents every deletion, even of damaged values.

    Only values of another namespace can be deleted.
    """
    disk = str(tmp_path / "kv")
    fill(f"{disk}?bytes_max=1GiB")
    change(file_of(disk, KEYS[0]), KEYS[0])
    flip(file_of(disk, KEYS[9]), HEADER_BYTES)
    before = held(disk)
    found = cache.json("verify", disk, "--delete", status=2)
    assert (found["good"], found["damaged"], found["unjudged"], found["deleted"]) == (8, 1, 1, 0)
    (space,) = found["unjudged_namespaces"]
    assert (space["namespace"], space["items"], space["why"].split(":")[0]) == (KEYS[0].namespace, 1, why)
    assert held(disk) == before
    assert cache.json("verify", disk, "--namespace", KEYS[9].namespace, "--delete", status=1)["deleted"] == 1


@pytest.mark.parametrize("change", [of_a_newer_version, of_another_layout, of_an_unknown_envelope])
def test_purge_keeps_namespaces_that_cannot_be_judged(
    change: Callable[[Path, Key], None], cache: Stated, tmp_path: Path
) -> None:
    """A namespace with values that cannot be judged is kept at any age, unless `--force` is given with its name."""
    disk = str(tmp_path / "kv")
    fill(f"{disk}?bytes_max=1GiB", KEYS + OTHERS)
    for key in OTHERS:
        change(file_of(disk, key), key)
    before = held(disk)
    for chosen in (["--all"], ["--older-than", "0s"], ["--namespace", OTHERS[0].namespace]):
        assert cache.json("purge", disk, *chosen, "--delete", status=2)["would_drop"] in {5, 15}
        assert held(disk) == before
    assert cache.json("purge", disk, "--namespace", OTHERS[0].namespace, "--force")["would_drop"] == 5
    assert held(disk) == before
    assert cache.json("purge", disk, "--namespace", OTHERS[0].namespace, "--force", "--delete")["dropped"] == 5
    assert cache.json("verify", disk)["good"] == len(KEYS)


def test_values_of_the_named_key_are_judged_beside_others(cache: Stated, disk: str) -> None:
    """If a folder has plain and encrypted values, the command with the key judges both. Plain values are counted."""
    fill(f"{disk}?bytes_max=1GiB", OTHERS)
    found = cache.json("verify", f"{disk}?encryption_key_env=GOOD_KEY")
    assert (found["good"], found["not_encrypted"], found["damaged"]) == (15, 5, 0)
    assert cache.json("verify", disk, status=2)["good"] == 5
    flip(file_of(disk, OTHERS[0]), HEADER_BYTES)
    assert cache.json("verify", disk, "--delete", status=2)["damaged"] == 1
    found = cache.json("verify", f"{disk}?encryption_key_env=GOOD_KEY", "--delete", status=1)
    assert (found["good"], found["damaged"], found["deleted"]) == (14, 1, 1)


def test_damage_under_the_right_key_is_damage(cache: Stated, disk: str) -> None:
    """Torn values and zeros are deleted. So is a value that has the key's name in its header, but does not decrypt."""
    flip(file_of(disk, KEYS[0]), HEADER_BYTES)
    file_of(disk, KEYS[1]).write_bytes(bytes(HEADER_BYTES + BODY))
    with file_of(disk, KEYS[2]).open("r+b") as torn:
        torn.truncate(ALIGN_BYTES + 1)
    found = cache.json("verify", f"{disk}?encryption_key_env=GOOD_KEY", "--delete", status=1)
    assert sorted(one["why"] for one in found["reasons"]) == ["decryption", "length", "zeros"]
    assert (found["good"], found["deleted"]) == (7, 3)


def test_value_that_was_replaced_meanwhile_is_kept(
    cache: Stated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged value is judged again before its deletion, because an engine may have replaced it."""
    disk = str(tmp_path / "kv")
    fill(f"{disk}?bytes_max=1GiB")
    whole = file_of(disk, KEYS[0]).read_bytes()
    for key in KEYS[:2]:
        flip(file_of(disk, key), HEADER_BYTES)

    def replace(*_: object, **__: object) -> None:
        file_of(disk, KEYS[0]).write_bytes(whole)

    monkeypatch.setattr("kvpipe.cli.cache._show", replace)
    assert cache("verify", disk, "--delete") == 1
    monkeypatch.undo()
    assert cache.json("verify", disk)["good"] == len(KEYS) - 1


def test_purge_deletes_only_listed_namespaces(cache: Stated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a namespace appears after the list was printed, the namespace stays, because it was not judged."""
    disk, late = str(tmp_path / "kv"), OTHERS[0]
    fill(f"{disk}?bytes_max=1GiB")

    def write(*_: object, **__: object) -> None:
        file = Path(disk) / late.namespace / late.chunk[:1].hex() / late.text
        if not file.exists():
            file.parent.mkdir(parents=True)
            file.write_bytes(bytes(HEADER_BYTES + BODY))

    monkeypatch.setattr("kvpipe.cli.cache._show", write)
    assert cache("purge", disk, "--all", "--delete") == 0
    monkeypatch.undo()
    assert [one["key"] for one in cache.json("ls", disk)["values"]] == [late.text]
