"""Tests of the disk tier: its configuration and its files."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from stat import S_IMODE
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from kvpipe.errors import ConfigError
from kvpipe.testing.buffers import NAMESPACE, content, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers.base import Capacity, Read, TierError, Written
from kvpipe.tiers.disk.files import ACCOUNT, TMP
from kvpipe.tiers.disk.spec import DiskSpec
from tests.tiers.disks import (
    KIB,
    MIB,
    ROOM,
    file_of,
    opened,
    reads,
    refusing,
    small_disk,
    spec_of,
    walk,
)

# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "stated"),
    [
        ("path", "var/kv", "absolute path"),
        ("path", "~nobody-is-called-so/kv", "absolute path"),
        ("bytes_max", 0, "greater than 0"),
        ("bytes_max", True, "not true or false"),
        ("bytes_max", "many", "bytes"),
        ("direct", "maybe", "'auto', 'on' or 'off'"),
        ("fsync", "perhaps", "boolean"),
    ],
)
def test_a_wrong_key_is_refused(key: str, value: object, stated: str) -> None:
    """An impossible value is refused. The message names the key of the value."""
    with pytest.raises(ValidationError, match=stated) as raised:
        DiskSpec.model_validate({"path": "/var/kv", key: value})
    assert raised.value.errors()[0]["loc"][0] == key


def test_a_url_stands_for_the_keys() -> None:
    """The path of a file URL is decoded, and `~` is the home folder. The URL's query gives the other keys."""
    given = DiskSpec.parse_url(urlsplit("file:///var/a%20b%23c?bytes_max=50GiB&direct=off"))
    spec = DiskSpec.model_validate(given)
    assert (spec.path, spec.bytes_max, spec.direct) == (Path("/var/a b#c"), 50 << 30, "off")
    assert DiskSpec.model_validate({"path": "~/kv"}).path == Path.home() / "kv"
    for wrong in ("file://var/kv", "file:var/kv", "file:///kv#part"):
        with pytest.raises(ValueError, match=r"three slashes|%23"):
            DiskSpec.parse_url(urlsplit(wrong))


def test_an_unfit_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a too small disk, and a folder without write permission are refused.

    The message has the key and the remedy.
    """
    tmp_path.joinpath("file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"path='.+': .+ is not a folder; name another path"):
            spec_of(path).make("disk")
    with pytest.raises(
        ConfigError, match=r"bytes_max=1EiB is more than the [\d.]+[KMGT]iB of the file .+; set a smaller"
    ):
        spec_of(tmp_path, bytes_max=1 << 60).make("disk")
    spec_of(tmp_path, bytes_max=1 << 60, store="never").make("disk")
    path = tmp_path / "disk"
    with (
        small_disk(path, 4 * MIB, monkeypatch) as mounted,
        refusing(path, errno.EROFS, mounted=mounted, patch=monkeypatch),
    ):
        with pytest.raises(ConfigError, match=r"cannot be written to; .+ store=never"):
            spec_of(path, bytes_max=MIB).make("disk")
        spec_of(path, bytes_max=MIB, store="never").make("disk")


def test_default_room_fits_a_small_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default on a large file system is 100 GiB. A size that a user has set is kept or refused, but not changed."""
    for blocks, room in ((1 << 40, 100 << 30), (1 << 20, 4096 * (1 << 20) * 4 // 5)):
        sizes = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _, sizes=sizes: sizes)
        spec = DiskSpec.model_validate({"path": tmp_path / "not" / "there"})
        assert spec.make("disk").spec.bytes_max == spec.fitted().bytes_max == room
    assert DiskSpec.model_validate({"path": tmp_path, "bytes_max": "1GiB"}).make("disk").spec.bytes_max == 1 << 30
    with pytest.raises(ConfigError, match="bytes_max=100GiB is more than the 4GiB of the file system"):
        DiskSpec.model_validate({"path": tmp_path, "bytes_max": "100GiB"}).make("disk")


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277])
def test_files_are_private(tmp_path: Path, mask: int) -> None:
    """Files have mode 0600 and folders 0700 under any umask. The name of a value's file is the value's key."""

    async def play() -> None:
        before = os.umask(mask)
        try:
            async with opened(tmp_path / "kv") as tier:
                await tier.write([put(1, 8 * KIB)])
                assert file_of(tmp_path / "kv", 1).read_bytes() == content(1, 8 * KIB)
                found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
                modes = {(path.is_dir(), S_IMODE(path.stat().st_mode)) for path in found}
                assert modes == {(True, 0o700), (False, 0o600)}
        finally:
            os.umask(before)

    run(play)


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    """Files with names that are no keys, or in a wrong folder, are not counted, listed, evicted or deleted."""
    here, name = file_of(tmp_path, 1).parent, some_key(1).text
    names = ("notes", name + ".tmp", name.upper(), name.replace("-g0", "-g00"), name.replace("-r0", "-r+0"))
    foreign = [here / n for n in names]
    foreign += [here.parent / name, tmp_path / name, here.parent / "zz" / name, tmp_path / "tmp" / "mine" / "0"]
    foreign += [tmp_path / "lost+found" / "x", here.parent / f"{int(here.name, 16) ^ 1:02x}" / name]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            assert (await tier.capacity()).items == 0
            for i in range(40):
                await tier.write([put(i, 64 * KIB)])
            await tier.delete([some_key(i) for i in range(40)])
            assert [entry async for entry in tier.scan()] == []
            assert await tier.capacity() == Capacity(0, 0, ROOM)

    run(play)
    assert all(path.read_bytes() == b"mine" for path in foreign)


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    """Reading a file that was deleted after the lookup is a MISS.

    After the read, lookups do not find the key, and its value can be written again.
    """

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB), put(2, 64 * KIB)])
            assert await tier.exists([some_key(1)]) == [True]
            file_of(tmp_path, 1).unlink()
            assert await reads(tier, 1) is Read.MISS
            assert await tier.exists([some_key(1), some_key(2)]) == [False, True]
            assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
            shutil.rmtree(file_of(tmp_path, 1).parent.parent)
            assert await reads(tier, 1) is Read.MISS

    run(play)


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB - 4096, 64 * KIB + 1, 128 * KIB])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, size: int) -> None:
    """A file that was cut or lengthened is DAMAGED. When the file is deleted, its room is free."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB)])
            os.truncate(file_of(tmp_path, 1), size)
            assert await reads(tier, 1) is Read.DAMAGED
            assert await tier.delete([some_key(1)]) == 1
            assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
            assert await reads(tier, 1) is Read.HIT

    run(play)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_folder_pipe_and_link_are_no_values(tmp_path: Path, kind: str) -> None:
    """A folder, a pipe or a link whose name is a key is not found by lookups, is not followed, and does no harm."""
    here, secret = file_of(tmp_path / "kv", 1), tmp_path / "secret"
    here.parent.mkdir(parents=True)
    secret.write_bytes(content(1, 64 * KIB))
    if kind == "folder":
        here.mkdir()
        here.joinpath("inside").touch()
    elif kind == "pipe":
        os.mkfifo(here)
    else:
        here.symlink_to(secret)

    async def play() -> None:
        async with opened(tmp_path / "kv") as tier:
            assert await tier.exists([some_key(1)]) == [False]
            assert await reads(tier, 1) is Read.DAMAGED
            assert await tier.delete([some_key(1)]) == 0
            # the folder contains a file that may belong to somebody else, so it is not deleted
            taken = kind == "folder"
            for _ in range(4):
                assert await tier.write([put(1, 64 * KIB)]) == [Written.PRESENT if taken else Written.STORED]
                assert await reads(tier, 1) is (Read.DAMAGED if taken else Read.HIT)
                assert await tier.delete([some_key(1)]) == (0 if taken else 1)
                if not taken:
                    here.parent.mkdir(parents=True, exist_ok=True)
                    here.symlink_to(secret) if kind == "link" else os.mkfifo(here)
            assert await tier.exists([some_key(1)]) == [False]
            assert here.is_dir() == taken
            assert await tier.write([put(2, 64 * KIB)]) == [Written.STORED]
            assert sum(walk(tmp_path / "kv").values()) == (await tier.capacity()).bytes_used

    run(play)
    assert secret.read_bytes() == content(1, 64 * KIB)


def test_an_empty_folder_makes_room_for_a_value(tmp_path: Path) -> None:
    """An empty folder may have a value's name. The write of this value deletes the folder."""
    file_of(tmp_path, 1).mkdir(parents=True)

    async def play() -> None:
        async with opened(tmp_path) as tier:
            assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
            assert await reads(tier, 1) is Read.HIT

    run(play)


def test_a_removed_folder_is_made_anew(tmp_path: Path) -> None:
    """The next probe of any process makes a deleted folder again. Then the tier works, and its account is right."""
    root = tmp_path / "kv"

    async def play() -> None:
        async with opened(root) as tier, opened(root) as other:
            for prober, another in ((tier, other), (other, tier)):
                assert await prober.write([put(1, 64 * KIB)]) == [Written.STORED]
                shutil.rmtree(root)
                with pytest.raises(TierError):
                    await prober.write([put(2, 64 * KIB)])
                await prober.health()
                await another.health()
                assert root.stat().st_mode & 0o777 == 0o700
                assert await prober.capacity() == (0, 0, prober.spec.bytes_max)
                assert await another.write([put(2, 64 * KIB)]) == [Written.STORED]
                assert await reads(prober, 2) is Read.HIT
                assert await prober.delete([some_key(2)]) == 1

    run(play)


def test_a_folder_is_not_made_where_its_file_system_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's disk is not mounted any more.

    Values would fill the disk below the mount point, so no folder is made.
    """
    root = tmp_path / "kv"

    async def play() -> None:
        async with opened(root) as tier:
            shutil.rmtree(root)
            monkeypatch.setattr(tier._root, "_device", -1)
            with pytest.raises(TierError, match="is not mounted; mount it"):
                await tier.health()
            assert not root.exists()

    run(play)


def test_the_last_process_leaves_nothing_in_an_empty_folder(tmp_path: Path) -> None:
    """The last process that closes an empty tier deletes all files of the tier.

    While a value or another process is left, all files stay.
    """

    async def play() -> None:
        async with opened(tmp_path):
            async with opened(tmp_path) as tier:
                await tier.write([put(1, 64 * KIB)])
            assert (tmp_path / ACCOUNT).exists()
        async with opened(tmp_path) as tier:
            assert (tmp_path / ACCOUNT).exists()
            assert await tier.delete([some_key(1)]) == 1

    run(play)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_links_are_not_followed(tmp_path: Path, depth: int) -> None:
    """A link in place of a folder or of the account is not followed: no file beyond the link is read or changed."""
    root, beyond = tmp_path / "kv", tmp_path / "beyond"
    link = (root / TMP, root / NAMESPACE, file_of(root, 1).parent, root / ACCOUNT)[depth]
    below = beyond / (file_of(root, 1).relative_to(link) if link in file_of(root, 1).parents else "")
    below.parent.mkdir(parents=True, exist_ok=True)
    below.mkdir() if below == beyond else below.write_bytes(content(1, 64 * KIB))
    link.parent.mkdir(parents=True)
    link.symlink_to(beyond)
    before = walk(beyond)

    async def play() -> None:
        async with opened(root, store="never") as tier:
            assert await tier.exists([some_key(1)]) == [False]
            assert await reads(tier, 1) is Read.MISS
        with contextlib.suppress(TierError):
            async with opened(root) as tier:
                with pytest.raises(TierError):
                    await tier.write([put(1, 64 * KIB)])
                with contextlib.suppress(TierError):
                    assert await tier.delete([some_key(1)]) == 0

    run(play)
    assert walk(beyond) == before
    assert link.is_symlink()
