"""Tests of the bytes of LoRA adapters: how they are read, used on the scheduler side, and checked by a rank."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.protocol.messages import BROKEN, Claim, Kind, Report, StepPlan
from kvpipe.scheduler.adapters import ALWAYS, Adapters
from kvpipe.testing.waiting import WAIT_S
from kvpipe.threads import adapter_files as module
from kvpipe.threads.adapter_files import FILES, AdapterFiles, AdapterReader, folder_of, read_as
from kvpipe.tiers.prefix_keys import chunk_name
from kvpipe.trace.log import Counters
from kvpipe.worker.adapters import HeldAdapters, Loaded
from tests.rigs.pipeline_rig import job

CONFIG, WEIGHTS = FILES[:2]


def _write(folder: Path, weights: bytes = b"one", *, at_ns: int = 1_700_000_000_000_000_000) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    for name, data in ((CONFIG, b"{}"), (WEIGHTS, weights)):
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(at_ns, at_ns))
    return str(folder)


def _ask(reader: AdapterReader, path: str) -> bytes:
    since_s, limit = time.monotonic(), time.monotonic() + WAIT_S
    while (digest := reader.digest(path, since_s)) is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    return digest


# ---- files ----------------------------------------------------------------------------------------------------------


def test_digest_of_an_adapter_depends_on_its_files_alone(tmp_path: Path) -> None:
    """Adapters with equal files in different folders have equal digests.

    Another byte or file name changes the digest.
    """
    files = AdapterFiles()
    one = files.read(_write(tmp_path / "a")).digest
    assert files.read(_write(tmp_path / "b", at_ns=1)).digest == one
    assert files.read(_write(tmp_path / "c", b"onf")).digest != one
    (tmp_path / "a" / WEIGHTS).rename(tmp_path / "a" / FILES[2])
    assert files.read(str(tmp_path / "a")).digest != one


def test_overwritten_file_is_read_again(tmp_path: Path) -> None:
    """A file is overwritten by a file of equal size and times, at once or long after the last read."""
    files, folder = AdapterFiles(), _write(tmp_path / "a")
    one = files.read(folder).digest
    _write(tmp_path / "a", b"two")  # so soon that the file's time may be the same
    assert (two := files.read(folder).digest) != one
    time.sleep(module.SETTLED_S)
    assert files.read(folder) == (settled := files.read(folder))
    assert settled.settled
    readings = files.readings
    assert files.read(folder).digest == two
    assert files.readings == readings
    _write(tmp_path / "a", b"six")
    assert files.read(folder).digest not in {one, two}


def test_adapter_that_changes_during_the_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that changes during the read is read again. An adapter that never stops changing is reported."""
    folder, changes = _write(tmp_path / "a"), [b"two"]
    read = module.digest_of

    def slow(path: str, signature: module.Signature) -> bytes:
        digest = read(path, signature)
        if changes:
            (tmp_path / "a" / WEIGHTS).unlink()
            _write(tmp_path / "a", changes.pop())
        return digest

    monkeypatch.setattr(module, "digest_of", slow)
    assert AdapterFiles().read(folder).digest == AdapterFiles().read(_write(tmp_path / "b", b"two")).digest
    changes += [b"%d" % i for i in range(9)]
    with pytest.raises(OSError, match="changes while it is read"):
        AdapterFiles().read(folder)


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / WEIGHTS)


def _socket(folder: Path) -> None:
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as one:
        one.bind(WEIGHTS)  # a relative name, because the address of a Unix socket has at most 107 bytes


def _device(folder: Path) -> None:
    (folder / WEIGHTS).symlink_to("/dev/zero")


def _loop(folder: Path) -> None:
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def _folder(folder: Path) -> None:
    (folder / WEIGHTS).mkdir()


def _huge(folder: Path) -> None:
    (folder / WEIGHTS).touch()
    os.truncate(folder / WEIGHTS, 1 << 40)


@pytest.mark.parametrize("hostile", [_fifo, _socket, _device, _loop, _folder, _huge])
def test_file_that_is_no_adapters_causes_one_error(tmp_path: Path, hostile: Any) -> None:
    """A file that is not regular, or that is larger than any adapter, is not read and causes one error at once."""
    folder = Path(_write(tmp_path / "a"))
    (folder / WEIGHTS).unlink()
    hostile(folder)
    files = AdapterFiles()
    with pytest.raises(OSError, match=r"no regular file|bytes|symbolic links"):
        files.read(str(folder))
    assert files.readings == 0


@pytest.mark.parametrize(
    "path", ["/nowhere", "", "a\0b", "\udcff", "nobody/nothing", "x" * 5000, "~nobody-at-all/x", "/dev/null"]
)
def test_invalid_path_causes_one_fault(path: str) -> None:
    """An invalid path causes one fault, no matter how often it is requested. Other adapters are read."""
    faults: list[str] = []
    reader = AdapterReader(lambda _, why: faults.append(why))
    assert [_ask(reader, path) for _ in range(3)] == [b""] * 3
    assert len(faults) == 1
    reader.stop()


def test_files_that_vllm_does_not_read_are_ignored(tmp_path: Path) -> None:
    """An adapter's folder may also have pipes, links, names that are not UTF-8, and thousands of files.

    None of these is touched.
    """
    folder = Path(_write(tmp_path / "a"))
    one = AdapterFiles().read(str(folder)).digest
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).touch()
    os.mkfifo(folder / "pipe")
    (folder / "up").symlink_to("/")
    for i in range(2000):
        (folder / f"{i}").touch()
    began_s = time.monotonic()
    assert AdapterFiles().read(str(folder)).digest == one
    assert time.monotonic() - began_s < WAIT_S


def test_digest_of_an_adapter_in_a_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter with a hub's id is read from the local cache, link by link. Nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--who--what"
    commit = "0123456789abcdef0123456789abcdef01234567"
    blob = Path(_write(home / "blobs"))
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(blob / name)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    assert folder_of("who/what") == str(snapshot)
    assert AdapterFiles().read(folder_of("who/what")).digest == AdapterFiles().read(str(blob)).digest
    with pytest.raises((OSError, ValueError)):
        folder_of("who/else")


def test_vllm_reads_no_other_files() -> None:
    """The files that a digest covers are exactly the files that vLLM's LoRA code names."""
    import re

    import vllm.lora

    sources = [path.read_text("utf-8") for path in Path(vllm.lora.__path__[0]).rglob("*.py")]
    named = {
        name for source in sources for name in re.findall(r'"([\w.-]+\.(?:json|safetensors|bin|pt|pth|npz))"', source)
    }
    assert named <= set(FILES)
    assert FILES[1] in named


# ---- the reader -----------------------------------------------------------------------------------------------------


def test_waiting_lookups_share_one_read_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty lookups of one adapter wait at once, and share at most two reads.

    A lookup without others reads the files anew.
    """
    folder, go, begun = _write(tmp_path / "a"), threading.Event(), threading.Event()
    read = module.digest_of

    def held(path: str, signature: module.Signature) -> bytes:
        begun.set()
        assert go.wait(WAIT_S)
        return read(path, signature)

    monkeypatch.setattr(module, "digest_of", held)
    reader = AdapterReader(lambda *_: None)
    asked = [time.monotonic()]
    assert reader.digest(folder, asked[0]) is None
    assert begun.wait(WAIT_S)
    for _ in range(60):
        asked.append(time.monotonic())
        assert reader.digest(folder, asked[-1]) is None
    go.set()
    _ask(reader, str(tmp_path / "b"))  # by now, all files that were requested before have been read
    assert len({reader.digest(folder, since_s) for since_s in asked}) == 1
    assert reader.readings == 2
    reader.stop()


# ---- the scheduler's side -------------------------------------------------------------------------------------------


class _Reader:
    """A reader that returns the digest `found`, or None as if the files were not read yet."""

    def __init__(self) -> None:
        self.found: bytes | None = None
        self.asked: list[float] = []

    def digest(self, _: str, since_s: float) -> bytes | None:
        """Return `found`, or None."""
        self.asked.append(since_s)
        return self.found


class _World:
    """The scheduler side's adapters, and one request with adapter 1."""

    def __init__(
        self, ranks: int = 1, *, seconds_max: float = 1000.0, in_place: bool = False, fused: bool = False
    ) -> None:
        """Start without known adapters."""
        self.reader = _Reader()
        self.side = Adapters(ranks, seconds_max, Counters())
        self.side.reader = self.reader  # type: ignore[assignment]
        lora = SimpleNamespace(
            lora_int_id=1, lora_name="a", lora_path="/a", load_inplace=in_place, is_3d_lora_weight=fused
        )
        self.request: Any = SimpleNamespace(request_id="r", lora_request=lora, block_hashes=[b"0", b"1"])
        self.side.begin_use(self.request)
        self.step = 0

    def keys(self, *, worth: bool = True) -> list[bytes] | None:
        """Look up in the next step. Return the keys, or None if the request waits."""
        self.step += 1
        if self.side.waits(self.request, self.step, worth=worth):
            return None
        return list(self.side.keys(self.request))

    def called(self, number: int) -> None:
        """Let vLLM load or remove an adapter after the last planned step."""
        self.side.called(number, self.step)

    def noted(self, news: dict[int, dict[int, bytes]], *, after: int = 1) -> None:
        """Let ranks report the adapters that they hold.

        The report is of the step that comes `after` steps after the last planned step.
        """
        self.side.reported(news, self.step + after)


def test_keys_cover_the_bytes() -> None:
    """Keys differ for each adapter and for requests without an adapter, in memory and in a tier."""
    world = _World()
    world.reader.found = b"d" * 16
    assert world.keys() == [b"0" + b"d" * 16, b"1" + b"d" * 16]
    world.request.block_hashes[1:] = [b"x", b"y"]  # a streaming session
    assert world.keys() == [b"0" + b"d" * 16, b"x" + b"d" * 16, b"y" + b"d" * 16]
    plain: Any = SimpleNamespace(request_id="p", lora_request=None, block_hashes=[b"0"])
    world.side.begin_use(plain)
    assert world.side.keys(plain) is plain.block_hashes
    assert world.side.claims([job(1)]) == ()
    assert chunk_name(b"h" * 32) == b"h" * 32 != chunk_name(b"h" * 32 + b"d" * 16) != chunk_name(b"h" * 32 + b"e" * 16)


def test_request_waits_for_adapter_files_only_if_it_may_find_chunks() -> None:
    """A lookup waits for the files only if the request may find something, and only for a limited time.

    The answer to a request does not change within a step.
    """
    world = _World()
    assert world.keys(worth=False) == []  # the request is computed at once, and saved as soon as a rank has reported
    world.noted({0: {1: b"d"}})
    assert world.keys(worth=False) == [b"0d", b"1d"]
    late = _World(seconds_max=0.0)
    assert late.keys() == []
    world = _World()
    assert world.keys() is None
    world.reader.found = b"d"
    assert world.side.waits(world.request, world.step, worth=True)  # the answer is the same as before in this step
    assert world.keys() == [b"0d", b"1d"]
    # the digest is requested once, however often the lookup is repeated
    assert len({world.reader.asked[1], world.reader.asked[2]}) == 1


def test_files_read_as_another_kind_of_adapter_have_other_keys() -> None:
    """If the engine reads the adapter as one of fused experts, its keys differ from the keys of the plain adapter."""
    world = _World(fused=True)
    world.reader.found = b"d" * 16
    other = read_as(b"d" * 16, fused=True)
    assert len(other) == 16
    assert other != b"d" * 16
    assert world.keys() == [b"0" + other, b"1" + other]
    world.noted({0: {1: other}})
    assert world.side.certain(world.request)
    unread = _World(fused=True)
    unread.reader.found = b""
    assert unread.keys() == []


def test_unreadable_adapter_has_no_keys() -> None:
    """The adapter has an unknown hub id, or unreadable files.

    Nothing is found or saved until a rank holds the adapter.
    """
    world = _World()
    world.reader.found = b""
    assert world.keys() == []
    assert not world.side.known(world.request)
    world.noted({0: {1: b"d"}})
    assert list(world.side.keys(world.request)) == [b"0d", b"1d"]


def test_digest_that_all_ranks_hold_overrides_that_of_the_files() -> None:
    """The digest that all ranks hold decides, not the files on disk.

    If the ranks' digests differ, there are no keys.
    """
    world = _World(ranks=2)
    world.reader.found = b"new"
    assert world.keys() == [b"0new", b"1new"]
    assert not world.side.certain(world.request)
    world.noted({0: {1: b"old"}})
    assert world.keys() == [b"0new", b"1new"]
    world.noted({1: {1: b"old"}})
    assert (
        list(world.side.keys(world.request)) == []
    )  # the old bytes have computed the KV, but the lookup used the key of the new bytes
    assert world.keys() == [b"0old", b"1old"]
    assert world.side.certain(world.request)
    world.noted({1: {1: b"other"}})
    assert world.keys() == []
    world.noted({0: {1: b""}, 1: {1: b""}})
    world.side.admitted(world.request, 9, 0)
    assert world.keys() == [b"0new", b"1new"]


def test_adapter_loaded_in_place_has_the_digest_of_its_files() -> None:
    """vLLM loads the adapter's files in every step.

    The digest is certain once the ranks hold the bytes of these files.
    """
    world = _World(in_place=True)
    world.noted({0: {1: b"old"}})
    world.reader.found = b"new"
    assert world.keys() == [b"0new", b"1new"]
    assert not world.side.certain(world.request)
    world.noted({0: {1: b"new"}})
    assert world.side.certain(world.request)


def _ranks_report(world: _World, stated: dict[int, bytes]) -> None:
    """Let a rank answer a step's questions with the digests of the adapters that the rank holds now."""
    asked = {claim.adapter for claim in world.side.claims([]) if not claim.job}
    rank = _Rank()
    rank.there = stated
    rank.held.checked(StepPlan(1, claims=world.side.claims([])))
    news = rank.held.news()
    assert news.keys() >= asked
    for index in range(world.side._ranks):
        world.noted({index: news})


@pytest.mark.parametrize("now", [b"new", b"old", b""])
def test_adapter_is_in_doubt_after_a_call_until_every_rank_has_reported(now: bytes) -> None:
    """After `add_lora` or `remove_lora`, earlier reports are ignored.

    If no rank holds the adapter, its files decide.
    """
    world = _World(ranks=2)
    world.reader.found = b"file"
    world.noted({rank: {1: b"old"} for rank in range(2)})
    assert world.keys() == [b"0old", b"1old"]
    world.called(2)  # another adapter
    assert world.keys() == [b"0old", b"1old"]
    world.called(1)
    assert world.keys() is None
    assert not world.side.certain(world.request)
    world.noted({0: {1: b"new"}})
    assert world.keys() is None
    _ranks_report(world, {1: now} if now else {})
    assert world.keys() == [b"0" + (now or b"file"), b"1" + (now or b"file")]
    assert world.side.claims([]) == ()


def test_report_of_a_step_that_began_before_the_call_is_ignored() -> None:
    """The step began before the call, so its report has the adapters of that time.

    The adapter's bytes stay unknown until a later step is reported.
    """
    world = _World(ranks=2)
    world.noted({rank: {1: b"old"} for rank in range(2)})
    assert world.keys() == [b"0old", b"1old"]
    world.called(1)
    world.noted({rank: {1: b"old"} for rank in range(2)}, after=0)
    assert world.keys() is None
    assert [claim.adapter for claim in world.side.claims([])] == [1]
    assert not world.side.certain(world.request)
    world.noted({rank: {1: b"new"} for rank in range(2)}, after=0)
    assert world.keys() == [b"0new", b"1new"]


def test_request_that_does_not_wait_has_no_keys_until_ranks_have_reported() -> None:
    """A lookup does not wait if it could find nothing, or if it has waited too long.

    The request's KV is saved once the adapter's bytes are known.
    """
    for world in (late := _World(seconds_max=0.0)), _World():
        world.noted({0: {1: b"old"}})
        if world is late:
            assert world.keys() == [b"0old", b"1old"]
        world.called(1)
        assert world.keys(worth=world is late) == []
        _ranks_report(world, {1: b"new"})
        assert list(world.side.keys(world.request)) == [b"0new", b"1new"]


def test_jobs_name_the_step_since_which_the_adapter_must_be_unchanged() -> None:
    """For a save, the rank must have held the adapter since the save's tokens were computed.

    If vLLM's cache held a part of the prefix, the rank must have held the adapter since the engine's first step.
    For a load, the rank must hold the adapter now.
    """
    world = _World()
    world.reader.found = b"d"
    world.keys()
    for local, since in ((0, 7), (32, 0)):
        world.side.admitted(world.request, 7, local)
        jobs = [job(1)._replace(request="r"), job(2, Kind.LOAD_SYNC)._replace(request="r"), job(3)]
        assert world.side.claims(jobs) == (Claim(1, 1, b"d", since), Claim(2, 1, b"d", ALWAYS))
    world.side.end_use(world.request)
    assert world.side.claims(jobs) == ()


# ---- the rank's side ------------------------------------------------------------------------------------------------


class _Rank:
    """A rank that holds the adapters that the test loads."""

    def __init__(self) -> None:
        """Start without adapters."""
        self.counters = Counters()
        self.held = HeldAdapters(self.counters)
        self.there: dict[int, bytes] = {}
        self.held.now = lambda: dict(self.there)
        self.step = 0

    def load(self, number: int, digest: bytes, name: str = "a") -> None:
        """Let vLLM load an adapter."""
        self.there[number] = digest
        self.held.loaded(Loaded(number, name, f"/{name}", digest))

    def takes(self, digest: bytes, since_step: int, kind: int = Kind.SAVE, number: int = 1) -> bool:
        """Run a step with one job, and return whether the job is carried out."""
        self.step += 1
        one = job(1, kind)
        plan = self.held.checked(StepPlan(self.step, (one,), claims=(Claim(1, number, digest, since_step),)))
        assert plan.jobs[0].blocks() == one.blocks()  # the job's blocks are reported if the job fails
        return bool((plan.jobs[0].table()[:, 1] != BROKEN).all())


def test_a_job_of_another_adapter_is_refused() -> None:
    """The rank must hold the job's adapter now. For a save, it must also have held the adapter since the given step."""
    rank = _Rank()
    assert not rank.takes(b"d", 1)
    rank.load(1, b"d")
    assert rank.takes(b"d", 0)
    assert not rank.takes(b"e", ALWAYS, Kind.LOAD_SYNC)
    assert not rank.takes(b"", ALWAYS, Kind.LOAD_SYNC)
    rank.load(1, b"d")  # the same adapter, evicted and loaded again
    assert rank.takes(b"d", 0)
    rank.load(1, b"e")
    assert rank.takes(b"e", rank.step + 1)
    assert not rank.takes(b"e", 1)
    changed = rank.step
    rank.load(1, b"d")
    assert not rank.takes(b"d", changed)  # the other adapter has computed a part of the saved KV
    assert rank.takes(b"d", changed, Kind.LOAD_SYNC) is False
    assert rank.takes(b"d", ALWAYS, Kind.LOAD_SYNC)
    del rank.there[1]
    assert not rank.takes(b"d", ALWAYS, Kind.LOAD_SYNC)
    assert rank.counters.faults["adapter_changed"] == 7


def test_save_is_refused_when_its_adapters_name_was_loaded_again_meanwhile() -> None:
    """vLLM's cache knows an adapter by name and path.

    So a hit may be KV of other bytes that had the same name before.
    """
    rank = _Rank()
    rank.load(1, b"d")
    rank.takes(b"d", 0)
    rank.load(2, b"e")
    assert not rank.takes(b"e", 0, number=2)
    assert rank.takes(b"e", rank.step + 1, number=2)
    assert not rank.takes(b"d", 0)
    assert rank.takes(b"d", rank.step + 1)


def test_sum_of_reports_has_the_step_of_the_slowest_rank() -> None:
    """The sum of several ranks' reports has the earliest of the steps that the ranks have reported."""
    report = Report(adapters={0: {1: b"d"}}, step=3)
    report.add(Report(adapters={1: {1: b"d"}}, step=2))
    assert (report.step, set(report.adapters)) == (2, {0, 1})


def test_rank_reports_its_adapters_once_when_they_change() -> None:
    """A rank reports its adapters once after each change, and again if the scheduler side does not know them."""
    rank = _Rank()
    assert rank.held.news() == {}
    rank.load(1, b"d")
    rank.load(2, b"e", "b")
    assert rank.held.news() == {1: b"d", 2: b"e"}
    assert rank.held.news() == {}
    del rank.there[1]
    rank.load(3, b"f", "c")
    assert rank.held.news() == {1: b"", 3: b"f"}
    rank.takes(b"x", 0, number=2)
    rank.takes(b"x", 0, number=1)
    assert rank.held.news() == {1: b"", 2: b"e"}


def test_forgotten_adapter_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that the rank has forgotten may have changed. KV that was computed with it before is not used."""
    monkeypatch.setattr("kvpipe.worker.adapters.KNOWN_MAX", 4)
    rank = _Rank()
    for number in range(1, 9):
        rank.load(number, b"d%d" % number, f"{number}")
        rank.takes(b"d%d" % number, ALWAYS, number=number)
    rank.load(1, b"d1", "1")
    assert not rank.takes(b"d1", 0)
    assert rank.takes(b"d1", rank.step + 1)
    assert len(rank.held._since) <= 4
