"""`kvpipe cache` on real files and a real server: its output, its deletions, and its exit status."""

from __future__ import annotations

import argparse
import base64
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.cli.cache import Findings, TierCommand, _purge, _stats
from kvpipe.cli.main import main
from kvpipe.testing.buffers import content, filled, some_key
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import ALIGN_BYTES, Key, Put, TierError
from kvpipe.tiers.envelope import HEADER_BYTES, Sealer
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.registry import parse_tier
from tests.rigs.interrupts import interrupts_enabled
from tests.rigs.servers.redis import polite, pretending, serving
from tests.rigs.servers.sockets import LOCAL, free_port

ONE, TWO = "1" * 32, "2" * 32
BODY = 4 * ALIGN_BYTES
KEYS = [some_key(i, space) for space in (ONE, TWO) for i in range(5)]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("KVPIPE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """Return the path of a disk tier that holds KEYS."""
    fill(f"{tmp_path}/kv?bytes_max=1GiB")
    return str(tmp_path / "kv")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a redis-server, and yield the server's URL."""
    with serving("redis") as started:
        yield f"redis://{LOCAL}:{started.port}"


def fill(where: str, keys: list[Key] = KEYS) -> None:
    """Write a value under each key, as an engine does."""
    spec = parse_tier(where)
    sealer = Sealer(secrets_of(spec))

    async def write() -> None:
        tier = spec.make("test")
        await tier.open()
        try:
            bodies = [filled(content(i, BODY), (BODY,))[0] for i in range(len(keys))]
            await tier.write([Put(key, sealer.seal(key, 4, body)) for key, body in zip(keys, bodies, strict=True)])
        finally:
            await tier.close()

    anyio.run(write)


def file_of(where: str, key: Key) -> Path:
    """Return the path of a value's file on disk."""
    (found,) = Path(where).rglob(f"*{key.text}*")
    return found


class Stated:
    """Runs `kvpipe cache` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""
        self.plan: dict[str, Any] | None = None

    def __call__(self, *args: str) -> int:
        """Run a command and return its exit status. `out` and `err` have its output."""
        try:
            status = main(["cache", *args])
        except SystemExit as end:  # argparse exits in this way
            status = int(str(end.code))
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *args: str, status: int = 0) -> dict[str, Any]:
        """Return the report of `--json` about the only tier.

        After the call, `plan` has the report that is printed before a deletion.
        """
        assert self(*args, "--json") == status
        assert bool(self.err) == (status == 2)
        *plans, report = map(json.loads, self.out.splitlines())
        self.plan = plans[0] if plans else None
        return dict(report)


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Stated:
    """Return a `Stated`, which runs `kvpipe cache`."""
    return Stated(capsys)


def test_every_subcommand_works_on_redis(cache: Stated, server: str) -> None:
    """The count, list, verify and purge commands work on a server as on a disk."""
    fill(server)
    assert cache.json("stats", server)["items"] == 10
    assert len(cache.json("ls", server)["values"]) == 10
    assert cache.json("verify", server)["good"] == 10
    assert cache.json("purge", server, "--namespace", ONE, "--delete")["dropped"] == 5
    assert cache.json("purge", server, "--all", "--delete")["dropped"] == 5
    assert cache.json("stats", server)["namespaces"] == []


def test_stats_reports_items_bytes_and_namespaces(cache: Stated, disk: str) -> None:
    """`stats` prints items, bytes, the limit, the health, and the share of each namespace."""
    found = cache.json("stats", f"{disk}?bytes_max=1PiB")
    size = HEADER_BYTES + BODY
    assert found["namespaces"] == [{"namespace": space, "items": 5, "bytes": 5 * size} for space in (ONE, TWO)]
    assert (found["tier"], found["kind"], found["health"]) == ("disk", "disk", "ok")
    assert (found["items"], found["bytes_max"]) == (10, 1 << 50)
    assert found["bytes"] >= 10 * size
    assert cache("stats", disk) == 0
    assert "100.0KiB" in cache.out
    assert ONE in cache.out


def test_ls_lists_keys(cache: Stated, disk: str) -> None:
    """`ls` prints sorted keys with size and age, and the number of keys. `--limit` and `--namespace` select keys."""
    found = cache.json("ls", disk)
    assert [one["key"] for one in found["values"]] == sorted(key.text for key in KEYS)
    assert {one["bytes"] for one in found["values"]} == {HEADER_BYTES + BODY}
    assert all(0 <= one["age_s"] < WAIT_S for one in found["values"])
    few = cache.json("ls", disk, "--limit", "3", "--namespace", TWO)
    assert [one["key"] for one in few["values"]] == sorted(key.text for key in KEYS[5:])[:3]
    assert (few["items"], few["listed"]) == (5, 3)
    assert cache("ls", disk) == 0
    assert all(key.text in cache.out for key in KEYS)
    assert "20.0KiB" in cache.out


def test_verify_reads_and_checks_every_value(cache: Stated, disk: str) -> None:
    """An undamaged value counts as good: the status is 0, and `--delete` drops nothing."""
    wanted = {"tier": "disk", "good": 10, "damaged": 0, "unjudged": 0, "gone_meanwhile": 0, "deleted": 0}
    assert cache.json("verify", disk, "--delete") == wanted | {"reasons": [], "damaged_values": []}
    assert cache.json("verify", disk, "--namespace", ONE)["good"] == 5


def test_verify_reports_damaged_values(cache: Stated, disk: str) -> None:
    """`verify` distinguishes flipped bytes, torn or too long files, zeros, and the value of another key.

    Files of other programs are not deleted.
    """
    files = [file_of(disk, key) for key in KEYS]
    flip(files[0], HEADER_BYTES + 100)
    flip(files[1], 20)
    os.truncate(files[2], HEADER_BYTES + 100)
    files[3].write_bytes(files[4].read_bytes())
    files[5].write_bytes(bytes(HEADER_BYTES + BODY))
    with files[6].open("ab") as stretched:
        stretched.write(bytes(ALIGN_BYTES))
    os.truncate(files[7], 0)
    os.truncate(files[8], HEADER_BYTES)
    (Path(disk) / "README").write_text("not kvpipe's", encoding="ascii")
    (files[9].parent / "notes.txt").write_text("nor this", encoding="ascii")
    found = cache.json("verify", disk, status=1)
    assert (found["good"], found["damaged"], found["deleted"]) == (2, 8, 0)
    why = {one["key"]: one["why"] for one in found["damaged_values"]}
    wanted = ["checksum", "header checksum", "length", "key", None, "zeros", "length", "length", "length", None]
    assert [why.get(key.text) for key in KEYS] == wanted
    assert {one["why"]: one["items"] for one in found["reasons"]}["length"] == 4

    assert cache.json("verify", disk, "--delete", status=1)["deleted"] == 8
    assert cache.plan is not None
    assert {one["key"]: one["why"] for one in cache.plan["values"]} == why
    assert cache.json("verify", disk)["good"] == 2
    assert (Path(disk) / "README").exists()


def test_each_value_is_checked_separately(cache: Stated, disk: str) -> None:
    """Values that are read in parallel are not mixed up: a header without a body is too short at every position."""
    for key in KEYS:
        os.truncate(file_of(disk, key), HEADER_BYTES)
    assert cache.json("verify", disk, status=1)["reasons"] == [{"why": "length", "items": len(KEYS)}]


def flip(file: Path, at: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(at)
        (old,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([old ^ 1]))


def test_verify_shows_a_table(cache: Stated, disk: str) -> None:
    """Without `--json`, `verify` prints the counts, the reasons and the damaged keys."""
    flip(file_of(disk, KEYS[0]), HEADER_BYTES)
    assert cache("verify", disk) == 1
    assert KEYS[0].text in cache.out
    assert "checksum" in cache.out
    assert "gone meanwhile" in cache.out


def test_verify_decrypts(cache: Stated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right key, values are good. An unusable key is refused, and the message does not show the key."""
    text = base64.b64encode(bytes(range(32))).decode()
    monkeypatch.setenv("GOOD_KEY", text)
    monkeypatch.setenv("SHORT_KEY", text[:20])
    path = str(tmp_path / "kv")
    fill(f"{path}?bytes_max=1GiB&encryption_key_env=GOOD_KEY")
    assert cache.json("verify", f"{path}?encryption_key_env=GOOD_KEY")["good"] == 10
    assert cache("verify", f"{path}?encryption_key_env=SHORT_KEY") == 2
    assert "SHORT_KEY" in cache.err
    assert text[:20] not in cache.err


class Sick(DictTier):
    """A tier that reports its capacity, but whose health check fails."""

    async def health(self) -> None:
        """See `Tier.health`."""
        raise TierError("dict: it is sick")


def test_stats_reports_why_a_tier_is_unhealthy() -> None:
    """If a tier is unhealthy, its items are reported with the reason, and the status is 1."""
    report = Findings()
    args = argparse.Namespace(namespace=None)
    assert anyio.run(_stats, TierCommand(Sick(), parse_tier("/x"), args, lambda: None, print), report) == 1
    assert (report["items"], report["health"]) == (0, "dict: it is sick")


def test_values_of_unknown_age_are_kept() -> None:
    """If a tier does not know the ages of its values, `--older-than` deletes no such value and reports the number."""
    tier, report = DictTier(), Findings()
    tier.values = {key.text: bytes(HEADER_BYTES) for key in KEYS}
    args = argparse.Namespace(namespace=ONE, older_than=0.0, delete=True, stale=False, force=False)
    assert anyio.run(_purge, TierCommand(tier, parse_tier("/x"), args, lambda: None, print), report) == 0
    assert report == {"dropped": 0, "bytes": 0, "kept_of_unknown_age": 5}
    assert len(tier.values) == 10


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["purge", "/x"], "--all, or any of --namespace, --older-than and --stale"),
        (["purge", "/x", "--all", "--namespace", ONE], "--all, or any of --namespace, --older-than and --stale"),
        (["purge", "/x", "--all", "--stale"], "--all, or any of --namespace, --older-than and --stale"),
        (["purge", "/x", "--all", "--older-than", "0s"], "--all, or any of --namespace, --older-than and --stale"),
        (
            ["purge", "/x", "--all", "--force"],
            "--force deletes values that cannot be judged; give their --namespace",
        ),
        (["purge", "/x", "--namespace", ONE, "--stale", "--force"], "--force deletes values that cannot be judged"),
        (["purge", "/x", "--all", "--delete", "--dry-run"], "not allowed with argument"),
        (["purge", "/x", "--older-than", "soon"], "'soon' is not an age: write 45s, 30m, 12h or 7d"),
        (["ls", "/x", "--namespace", "abc"], "'abc' is not a namespace: give the 32 hex digits"),
        (["ls", "/x", "--limit", "0"], "'0' is not a count"),
        (["stats"], "no tier is named; write a URL or a path, or set KVPIPE_TIERS"),
        (["stats", "reddis://h"], "did you mean 'redis://'?"),
        (["stats", "/x", "/x"], "tier 2 (disk) is the same store as tier 1"),
        (["burn", "/x"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_refused(cache: Stated, args: list[str], wanted: str) -> None:
    """Wrong usage gives status 2 and one sentence on stderr, and no tier is opened."""
    assert cache(*args) == 2
    assert wanted in cache.err
    assert not cache.out


@pytest.mark.parametrize("where", ["environment", "file"])
def test_the_configurations_tiers_are_the_default(
    where: str, cache: Stated, disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tier on the command line, the tiers of KVPIPE_TIERS or of KVPIPE_CONFIG_FILE are used."""
    (tmp_path / "file").write_text(f"tiers: [{{kind: disk, path: {disk}}}]", encoding="ascii")
    monkeypatch.setenv(
        *{"environment": ("KVPIPE_TIERS", disk), "file": ("KVPIPE_CONFIG_FILE", str(tmp_path / "file"))}[where]
    )
    assert cache.json("stats")["items"] == 10


def test_a_tier_that_cannot_be_used_is_one_sentence(cache: Stated, disk: str) -> None:
    """A tier that fails gives status 1 and one line on stderr. The command still handles the other tiers."""
    port = free_port()
    assert cache("stats", f"redis://{LOCAL}:{port}", disk, "--json") == 1
    assert json.loads(cache.out)["tier"] == "disk"
    (line,) = cache.err.splitlines()
    assert line.startswith("kvpipe: redis")
    assert str(port) in line


def test_no_subcommand_creates_a_missing_folder(cache: Stated, tmp_path: Path) -> None:
    """No subcommand creates a folder, so a misspelt path is an error."""
    for args in (["stats"], ["ls"], ["verify"], ["purge", "--all"]):
        assert cache(*args, str(tmp_path / "typo")) == 1
        assert len(cache.err.splitlines()) == 1
    assert not (tmp_path / "typo").exists()


ELSEWHERE = """
import signal, sys, threading, time
from kvpipe.cli.main import main; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
sys.exit(main())
"""
"""A program that runs the command. Another thread gets the interrupts, so they do not end waits of the main thread."""


def command(*args: str, code: str = "", **kwargs: Any) -> subprocess.Popen[str]:
    """Start `kvpipe cache` in a process that gets interrupts.

    `code`, if not "", is the program that runs the command.
    """
    words = [sys.executable, *(["-c", code] if code else ["-m", "kvpipe"]), "cache", *args]
    with interrupts_enabled():
        return subprocess.Popen(words, text=True, **kwargs)


@pytest.mark.parametrize("code", ["", ELSEWHERE], ids=["here", "elsewhere"])
def test_an_interrupt_gives_status_130_and_one_word(code: str) -> None:
    """An interrupt while the command waits for a tier, or just before, gives status 130 and one word on stderr."""
    with socket.create_server((LOCAL, 0)) as silent:
        silent.settimeout(WAIT_S)
        url = f"redis://{LOCAL}:{silent.getsockname()[1]}?timeout_ms_max=600000"
        process = command("stats", url, code=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)  # the command now waits for an answer
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, out, err) == (130, "", "kvpipe: interrupted\n")


def test_progress_is_for_terminals(disk: str) -> None:
    """On a terminal, stderr shows the number of listed values. stdout has only the result."""
    ours, theirs = pty.openpty()
    process = command(
        "verify", disk, "--json", stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    out, _ = process.communicate(timeout=WAIT_S)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        shown = screen.read(4096)
    assert process.returncode == 0
    assert json.loads(out)["good"] == 10
    assert b"disk" in shown
    assert b"values" in shown


@pytest.mark.parametrize("size", [1 << 60, (1 << 63) - 1, -5, (8 << 30) + 1, 0])
def test_absurd_lengths_are_damage(cache: Stated, size: int) -> None:
    """If a tier lists a value with an impossible length, the value is not read, and no memory is allocated for it."""
    key = KEYS[0].text.encode()

    def answer(words: list[bytes]) -> bytes:
        name = b"kvpipe:" + key
        return {
            b"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$%d\r\n%b\r\n" % (len(name), name),
            b"STRLEN": b":%d\r\n" % size,
            b"OBJECT": b":5\r\n",
            b"GET": b"$5\r\nhello\r\n",
        }[words[0]]

    with pretending(polite(answer)) as port:
        found = cache.json("verify", f"redis://{LOCAL}:{port}", status=0 if size == 0 else 1)
    assert found["reasons"] == ([] if size == 0 else [{"why": "length", "items": 1}])


def test_a_long_file_without_content_is_damage(cache: Stated, disk: str) -> None:
    """A sparse file that is longer than any value is reported as damaged without being read.

    The other values are still checked.
    """
    os.truncate(file_of(disk, KEYS[3]), 9 << 30)
    found = cache.json("verify", disk, status=1)
    assert (found["good"], found["reasons"]) == (9, [{"why": "length", "items": 1}])
    assert cache.json("verify", disk, "--delete", status=1)["deleted"] == 1
    assert cache.json("verify", disk)["good"] == 9
