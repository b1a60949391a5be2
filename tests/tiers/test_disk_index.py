"""The disk tier has an index of its files. The index follows the changes that other processes make."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from kvpipe.testing.buffers import NAMESPACE, put, some_key
from kvpipe.testing.tier_conformance.worlds import run, tried
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Capacity, Key, Noticing, Read, TierError, TierFullError, Written
from kvpipe.tiers.disk import files as disk_files
from kvpipe.tiers.disk import index as disk_index
from kvpipe.tiers.disk import tier as disk_tier
from kvpipe.tiers.disk.files import TMP, folders_of
from kvpipe.tiers.disk.tier import DiskTier
from tests.rigs.tier_worlds.disk import grow_old
from tests.tiers.disks import (
    KIB,
    names,
    opened,
    reads,
    spec_of,
)


def test_values_of_another_client_are_found_soon(tmp_path: Path) -> None:
    """A client soon notices values that another client writes or deletes, even if it never writes itself."""
    assert disk_tier._LOOK_S < disk_tier._OLD_S < 1

    async def known(tier: DiskTier, wanted: list[bool]) -> None:
        while await tier.exists([some_key(1), some_key(2)]) != wanted:  # noqa: ASYNC110  (nothing notifies)
            await anyio.sleep(0.02)

    async def play() -> None:
        async with opened(tmp_path, writes=False) as reader, opened(tmp_path) as tier, opened(tmp_path) as other:
            for wanted in ([True, False], [True, True]):
                await other.write([put(sum(wanted), 64 * KIB)])
                for one in (reader, tier):
                    await known(one, wanted)
            await other.delete([some_key(1)])
            for one in (reader, tier):
                await known(one, [False, True])

    run(play)


def test_folder_may_be_removed_and_created_again(tmp_path: Path) -> None:
    """Values in a folder that is moved away are misses, and are found again when the folder is moved back."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB)])
            await anyio.sleep(0.1)  # waits until the folder's time proves that the folder was not changed since
            assert (await tier.capacity()).items == 1
            (tmp_path / NAMESPACE).rename(tmp_path / "aside")
            assert await tier.capacity() == Capacity(0, 0, 1 << 30)
            (tmp_path / "aside").rename(tmp_path / NAMESPACE)
            assert await tier.capacity() == Capacity(1, 64 * KIB, 1 << 30)
            assert await tier.exists([some_key(1)]) == [True]

    run(play)


def test_keys_of_deleted_files_are_forgotten(tmp_path: Path) -> None:
    """A client that only looks up keys holds no key of deleted files, however long it runs."""
    many = 50

    def held() -> int:
        gc.collect()
        return sum(type(one) is Key for one in gc.get_objects())

    async def play() -> None:
        async with opened(tmp_path, writes=False) as reader, opened(tmp_path) as other:
            before = held()
            for turn in range(4):
                keys = [some_key(turn * many + number) for number in range(many)]
                await other.write([put(turn * many + number, KIB) for number in range(many)])
                assert (await reader.capacity()).items == many
                await other.delete(keys)
                assert (await reader.capacity()).items == 0
            del keys
            assert held() < before + many

    run(play)


def test_a_reader_leaves_no_trace(tmp_path: Path) -> None:
    """With store=never the tier creates and writes nothing.

    A missing folder is reported, and is used once it exists.
    """

    async def play() -> None:
        reader = spec_of(tmp_path / "kv", store="never").make("disk")
        with pytest.raises(TierError, match="No such file"):
            await reader.open()
        assert names(tmp_path) == []
        async with opened(tmp_path / "kv") as tier:
            await tier.write([put(1, 64 * KIB)])
            before = names(tmp_path)
            await reader.open()
            assert await reads(reader, 1) is Read.HIT
            with pytest.raises(TierFullError, match="only read"):
                await reader.write([put(2, 64 * KIB)])
            await reader.health()
            await reader.close()
            assert names(tmp_path) == before

    run(play)


def test_changes_during_a_listing_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the folders are listed, this process writes and deletes.

    The index keeps these changes, even if the listing shows other files.
    """
    same = [key for i in range(4000) if (key := some_key(i)).chunk[0] == some_key(0).chunk[0]][:3]
    real = disk_files.list_folder

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(0, 4096)._replace(key=key) for key in same[:2]])

            def meanwhile(at: int) -> Any:
                found = real(at)
                monkeypatch.setattr("kvpipe.tiers.disk.index.list_folder", real)
                assert tier._room.delete(same[:1]) == 1
                assert tier._write(put(0, 4096)._replace(key=same[2])) is Written.STORED
                return found

            await anyio.sleep(0.06)
            monkeypatch.setattr("kvpipe.tiers.disk.index.list_folder", meanwhile)
            tier._index._shelves[folders_of(same[0])].changed_ns = None
            tier._pass()
            assert tier._index.holds(same) == [False, True, True]
            assert tier._index.total() == (2, 8192)
            tier._pass()
            assert tier._index.holds(same) == [False, True, True]

    run(play)


def test_value_deleted_during_a_listing_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing has seen another process's file. If this process then deletes the file, the file is not found."""

    async def play() -> None:
        async with opened(tmp_path) as tier, opened(tmp_path) as other:
            await other.write([put(1, 4096)])

            @contextlib.contextmanager
            def folder(*args: Any) -> Iterator[int]:
                with disk_files.folder(*args) as fd:
                    yield fd
                deleted.extend([tier._room.delete([some_key(1)])] if not deleted else [])

            deleted: list[int] = []
            monkeypatch.setattr("kvpipe.tiers.disk.index.folder", folder)
            tier._pass()
            assert deleted == [1]
            assert tier._index.holds([some_key(1)]) == [False]
            assert tier._index.total() == (0, 0)

    run(play)


def test_names_are_read_as_keys_are() -> None:
    """The index accepts a file name exactly if the name is a key's text."""
    index, base = disk_index.Index(), some_key(1).text
    names = [base, *(some_key(i).text for i in range(5)), base.upper(), base + "0", base[1:], base.replace("-", "_")]
    names += [re.sub("-[0-9a-f]{64}", f"-{chunk}", base) for chunk in ("", "ab" * 15, "ab" * 16, "ab" * 65, "ab " * 20)]
    for name in names:
        try:
            wanted: Key | None = Key.parse(name)
        except ValueError:
            wanted = None
        assert index._key(name) == wanted, name


# ---- many lookups, many namespaces ----------------------------------------------------------------------------------


def test_lookups_that_wait_hold_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lookups that wait for a slow listing wait for the same listing, without threads of their own."""
    go_on, real = threading.Event(), disk_index.Index.refresh
    passes = []

    def slow(self: disk_index.Index, *args: Any) -> None:
        passes.append(args)
        go_on.wait(WAIT_S)
        real(self, *args)

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 4096)])
            grow_old(tier)
            before = threading.active_count()
            monkeypatch.setattr(disk_index.Index, "refresh", slow)
            answers: list[list[bool]] = []

            async def ask() -> None:
                answers.append(await tier.exists([some_key(1), some_key(2)]))

            async with anyio.create_task_group() as group:
                for _ in range(200):
                    group.start_soon(ask)
                await anyio.sleep(0.2)
                assert threading.active_count() <= before + 1
                assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
                assert await reads(tier, 1, 4096) is Read.HIT, "other lookups continue"
                assert not answers
                # the listing counts as fresh, even if the waiting lookups continue late
                for age in ("_OLD_S", "_LOOK_S"):
                    monkeypatch.setattr(disk_tier, age, WAIT_S)
                go_on.set()
            assert answers == [[True, False]] * 200
            assert len(passes) == 1

    run(play)


def test_a_listing_that_does_not_end_is_waited_for_no_longer_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups end after timeout_ms_max with TierError. A tier that is opened again begins a new listing."""
    go_on, real = threading.Event(), disk_index.Index.refresh

    async def play() -> None:
        async with opened(tmp_path, timeout_ms_max=200) as tier:
            await tier.write([put(1, 4096)])
            grow_old(tier)
            monkeypatch.setattr(disk_index.Index, "refresh", lambda *_: go_on.wait(WAIT_S))
            for _ in range(2):
                with pytest.raises(TierError, match="no listing in timeout_ms_max=200"):
                    await tier.exists([some_key(1)])
            monkeypatch.setattr(disk_index.Index, "refresh", real)
            go_on.set()
            await tier.close()
            await tier.open()
            assert await tried(tier.exists, [some_key(1)]) == [True]

    run(play)


def test_a_lookup_looks_at_its_own_namespace_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup reads only the folders of its own namespace, and finds new values."""
    looked: list[int] = []
    real = disk_files.folder

    @contextlib.contextmanager
    def counted(*args: Any) -> Iterator[int]:
        looked.append(1)
        with real(*args) as fd:
            yield fd

    async def play() -> None:
        async with opened(tmp_path, writes=False) as reader, opened(tmp_path) as other:
            await other.write([put(1, 4096), *(put(2, 4096, namespace=f"{i:032x}") for i in range(100))])
            grow_old(reader)
            monkeypatch.setattr(disk_index, "folder", counted)
            assert await reader.exists([some_key(1)]) == [True]
            assert len(looked) <= 4
            assert await reader.exists([some_key(2, f"{7:032x}")]) == [True], "the first time that it is asked for"
            assert await reader.exists([some_key(2, f"{999:032x}")]) == [False]
            assert len(looked) <= 20
            everywhere = [some_key(2, f"{i:032x}") for i in range(100)]
            assert await reader.exists(everywhere) == [True] * 100, "however many at once"
            assert (await reader.capacity()).items == 101

    run(play)


def test_stored_value_is_found_whatever_the_age_of_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow listing is already old when it ends.

    Lookups still find the values that this engine stored after the listing's beginning, until the namespace is listed
    again.
    """
    real = disk_index.Index.refresh

    async def play() -> None:
        async with opened(tmp_path, writes=False) as finder, opened(tmp_path) as carrier:
            tier = cast("DiskTier", finder)
            key, other = some_key(1), some_key(2, "e" * 32)
            assert await tier.exists([key, other]) == [False, False]
            tier._last = tier._last._replace(took_s=1000.0)
            await carrier.write([put(1, 4096)])
            assert await tier.exists([key]) == [False]
            tier.stored([key, other])
            assert await tier.exists([key, other]) == [True, True]
            tier._pass(frozenset({NAMESPACE}))
            assert tier._index.holds([key, other]) == [True, True]
            await carrier.delete([key])
            tier._pass(frozenset({NAMESPACE}))
            assert tier._index.holds([key, other]) == [False, True]

            def overtaken(index: disk_index.Index, *args: Any) -> None:
                with monkeypatch.context() as patch:
                    patch.setattr(index, "_look", lambda *_: index.record_written([key]))
                    real(index, *args)

            await carrier.write([put(1, 4096)])
            monkeypatch.setattr(disk_index.Index, "refresh", overtaken)
            tier._pass(frozenset({NAMESPACE}))
            assert tier._index.holds([key]) == [True], "it was told during the pass"

    run(play)


def test_reader_is_notified_of_deleted_values(tmp_path: Path) -> None:
    """The reader is notified of values deleted before a listing, except values that were written again."""

    async def play() -> None:
        async with opened(tmp_path, writes=False) as finder, opened(tmp_path) as carrier:
            tier, gone = cast("DiskTier", finder), list[Key]()
            assert isinstance(tier, Noticing)
            tier.on_gone = gone.append
            await carrier.write([put(number, 4096) for number in range(3)])
            tier._pass()
            await carrier.delete([some_key(0), some_key(1)])
            tier.stored([some_key(1), some_key(3)])
            assert gone == []
            tier._pass()
            assert sorted(gone) == sorted(some_key(number) for number in (0, 1, 3))
            gone.clear()
            tier._pass()
            assert gone == []

    run(play)


def test_a_reader_is_not_notified_of_a_value_that_is_written_again_during_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is not notified, because the value exists, although the listing does not contain it."""
    real = disk_files.folders

    async def play() -> None:
        async with opened(tmp_path, writes=False) as finder, opened(tmp_path) as carrier:
            tier, gone = cast("DiskTier", finder), list[Key]()
            tier.on_gone = gone.append
            await carrier.write([put(1, 4096)])
            tier._pass()
            await carrier.delete([some_key(1)])

            def folders(*args: Any) -> Any:
                tier.stored([some_key(1)])
                return real(*args)

            monkeypatch.setattr(disk_index, "folders", folders)
            tier._pass()
            assert gone == []

    run(play)


def folders_in(path: Path) -> list[str]:
    """Return the folders of namespaces, and the folders inside them."""
    found = [one.relative_to(path) for one in path.rglob("*") if one.is_dir()]
    return sorted(str(one) for one in found if one.parts[0] != TMP)


@pytest.mark.parametrize("how", ["delete", "evict", "by hand"])
def test_folders_that_are_empty_are_removed(tmp_path: Path, how: str) -> None:
    """When the last value of a folder is deleted, the folder is removed, and then its namespace's folder.

    Old empty folders are removed when a tier is opened.
    """
    spaces = [f"{i:032x}" for i in range(20)]

    async def play() -> None:
        async with opened(tmp_path, bytes_max=20 * 64 * KIB) as tier:
            await tier.write([put(1, 64 * KIB, namespace=space) for space in spaces])
            assert len(folders_in(tmp_path)) == 40
            if how == "delete":
                assert await tier.delete([some_key(1, space) for space in spaces]) == 20
            elif how == "evict":
                await tier.write([put(i, 64 * KIB) for i in range(20)])
            else:
                for one in names(tmp_path):
                    if one.name.endswith("of1"):
                        one.unlink()
                (tmp_path / ("e" * 32)).mkdir()
                (tmp_path / ("f" * 32)).mkdir()
                (tmp_path / ("f" * 32) / "notes").touch()
                (tmp_path / "mine").mkdir()
        async with opened(tmp_path, bytes_max=20 * 64 * KIB) as tier:
            left = {one.split("/")[0] for one in folders_in(tmp_path)}
            assert left == {"evict": {NAMESPACE}, "by hand": {"f" * 32, "mine"}}.get(how, set())
            assert await tier.write([put(1, 64 * KIB, namespace=spaces[0])]) == [Written.STORED]
            assert await reads(tier, 1, 64 * KIB, namespace=spaces[0]) is Read.HIT

    run(play)


CHURN = """
import sys
from pathlib import Path
from kvpipe.tiers.base import Written
from kvpipe.testing.buffers import put, some_key
from tests.tiers.disks import opened
from kvpipe.testing.tier_conformance import run
async def play():
    async with opened(Path(sys.argv[1])) as tier:
        for i in range(150):
            assert await tier.write([put(1, 4096)]) in ([Written.STORED], [Written.PRESENT])
            await tier.delete([some_key(1)])
run(play)
"""


def test_a_folder_is_not_removed_under_a_writer(tmp_path: Path) -> None:
    """Processes write and delete the only value of a namespace, so folders appear and disappear.

    No write fails because of this.
    """
    children = [
        subprocess.Popen([sys.executable, "-c", CHURN, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)
    ]
    try:
        assert [(child.communicate(timeout=WAIT_S)[1], child.returncode) for child in children] == [(b"", 0)] * 3
    finally:
        for child in children:
            child.kill()
    assert folders_in(tmp_path) == []
