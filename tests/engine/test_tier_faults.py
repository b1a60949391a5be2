"""A real engine whose tiers fail in mid-run gives the same answers and does not stall.

When a tier works again, the engine has hits again.
"""

from __future__ import annotations

import errno
import json
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.testing.waiting import PATIENT_MS, eventually
from kvpipe.trace.events import TierLeft
from kvpipe.trace.reader import Trace
from tests.engine.common import BLOCK, assert_clean, baseline, engine, prompt, whole_blocks
from tests.rigs.servers.mooncake import master, node
from tests.rigs.servers.proxy import Proxy
from tests.rigs.servers.redis import serving
from tests.rigs.servers.s3 import S3Server, shared
from tests.rigs.servers.secured import KINDS, secured
from tests.rigs.servers.sockets import LOCAL
from tests.rigs.tier_worlds.mooncake import spec_of as mooncake_spec
from tests.rigs.tier_worlds.s3 import spec_of as s3_spec

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 81), prompt(200, 82)]
DUE = whole_blocks(BLOCK, *map(len, PROMPTS))
TOKENS = 8
OWN: dict[str, Any] = {"enable_prefix_caching": False}
IDLE_STEPS_MAX = 4000
"""The limit of steps without a running request.

A fault may delay two requests for `lookup_ms_max` each, and a step that waits takes at least a millisecond. A slow
machine only makes fewer steps in this time.
"""


def _config(*tiers: dict[str, Any], timeout_ms_max: int = 500, lookup_ms_max: int = 1000) -> dict[str, Any]:
    made = [tier | {"timeout_ms_max": timeout_ms_max} for tier in tiers]
    return {"chunk_tokens": 64, "lookup_ms_max": lookup_ms_max, "tiers": made}


class Played:
    """An engine with tiers. The engine's memory can be emptied, so that only the tiers hold chunks."""

    def __init__(self, live: Engine, expected: Sequence[Sequence[int]]) -> None:
        """Keep the engine and the expected answers."""
        self.live, self.expected = live, expected
        self._seen = self._idle_steps = 0
        self._step = live.step
        live.step = self._counted  # type: ignore[method-assign]

    def _counted(self) -> list[Any]:
        ended = self._step()
        self._idle_steps += self.live.busy and not self.live.scheduler.running
        return ended

    def play(self) -> int:
        """Drop all chunks in memory and repeat the prompts. Return the number of tokens that were loaded from tiers."""
        side = self.live.connector.scheduler
        assert side is not None
        side.catalog.reset()
        self._idle_steps = 0
        assert self.live.generate(PROMPTS, TOKENS) == self.expected
        assert self._idle_steps < IDLE_STEPS_MAX
        assert_clean(self.live)
        found = sum(tokens for tier, tokens in side.tracer.hit_tokens.items() if tier != "memory")
        brought, self._seen = found - self._seen, found
        return brought

    def until(self, tokens: int) -> None:
        """Repeat the prompts until `tokens` tokens are loaded from tiers."""
        brought: list[int] = []

        def enough() -> bool:
            brought.append(self.play())
            return brought[-1] == tokens

        assert eventually(enough, every_s=0.1), brought


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the answers that every engine in this file must give."""
    return baseline(PROMPTS, TOKENS, **OWN)


def _flip(files: list[Path]) -> None:
    """Flip one bit of each file's body."""
    for i, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[random.Random(i).randrange(4096, len(data))] ^= 8
        file.write_bytes(data)


def _truncate(files: list[Path]) -> None:
    """Cut each file in the middle."""
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _swap(files: list[Path]) -> None:
    """Exchange the bytes of files between keys."""
    held = [file.read_bytes() for file in files]
    for file, data in zip(files, held[1:] + held[:1], strict=True):
        file.write_bytes(data)


def _header_only(files: list[Path]) -> None:
    """Leave only the header of each file. Each file keeps the length of a whole value, like a half-written file."""
    for file in files:
        size = file.stat().st_size
        file.write_bytes(file.read_bytes()[:4096].ljust(size, b"\0"))


def _unlink(files: list[Path]) -> None:
    """Delete the files without updating the index."""
    for file in files:
        file.unlink()


def _aside(files: list[Path]) -> None:
    """Move the folder away, and put a file at the folder's path."""
    folder = next(parent for parent in files[0].parents if parent.name == "kv")
    folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")


def test_disk_in_mid_run(tmp_path: Path, expected: list[list[int]]) -> None:
    """Files are changed by a bit, cut, exchanged, half written and deleted. Then the folder disappears and returns."""
    tier = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}
    config = _config(tier, timeout_ms_max=PATIENT_MS, lookup_ms_max=PATIENT_MS)  # the disk does not hang
    faults: list[Callable[[list[Path]], None]] = [_flip, _truncate, _swap, _header_only, _unlink]
    with engine(kvpipe=config, **OWN) as live:
        played = Played(live, expected)
        played.play()
        for fault in faults:
            played.until(DUE)
            fault(sorted((tmp_path / "kv").rglob("*-g0-r0of1")))
            assert played.play() < DUE, fault.__name__
        played.until(DUE)
        _aside(sorted((tmp_path / "kv").rglob("*-g0-r0of1")))
        played.play()
        (tmp_path / "kv").unlink()
        shutil.move(tmp_path / "aside", tmp_path / "kv")
        played.until(DUE)
        counters = live.worker_connector.counters
        assert counters["chunk_damaged"] >= len(PROMPTS) * 3


def test_redis_in_mid_run(expected: list[list[int]]) -> None:
    """The server is slow, cuts connections, stalls, stops, is full, asks for a password, and is killed.

    After each fault the engine has hits again.
    """
    with serving("redis") as server, Proxy(server.port) as proxy:
        tier = {"kind": "redis", "host": LOCAL, "port": proxy.port}
        with engine(kvpipe=_config(tier), **OWN) as live:
            played = Played(live, expected)
            played.play()
            played.until(DUE)

            proxy.rate_bytes_s = 2e6
            assert played.play() <= DUE
            proxy.rate_bytes_s = None
            proxy.cut_after = 300_000
            assert played.play() < DUE
            proxy.cut_after = None
            played.until(DUE)
            proxy.stalled = True
            assert played.play() == 0
            proxy.stalled = False
            played.until(DUE)

            server.send(signal.SIGSTOP)
            assert played.play() == 0
            server.send(signal.SIGCONT)
            played.until(DUE)

            server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.ask("FLUSHALL")
            server.ask("CONFIG", "SET", "maxmemory", "1")
            assert [played.play() for _ in range(2)] == [0, 0]
            server.ask("CONFIG", "SET", "maxmemory", "0")
            played.until(DUE)

            server.ask("CONFIG", "SET", "requirepass", "not told")
            proxy.cut()
            assert played.play() == 0
            with redis.Redis(LOCAL, server.port, password="not told") as client:  # noqa: S106  (not a secret)
                client.config_set("requirepass", "")
            played.until(DUE)

            server.send(signal.SIGKILL)
            assert played.play() == 0
            server.start()
            played.until(DUE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_full_disk_changes_no_answer(
    tmp_path: Path, expected: list[list[int]], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk becomes full, read-only or forbidden while the engine runs.

    While writes are refused, kvpipe still reads the disk. When writes succeed again, kvpipe writes to the disk again.
    """
    config = _config({"kind": "disk", "path": str(tmp_path / "kv")})
    with engine(kvpipe=config, **OWN) as live:
        played = Played(live, expected)
        with monkeypatch.context() as patch:
            patch.setattr("os.ftruncate", _raising(OSError(number, "refused")))
            assert [played.play() for _ in range(2)] == [0, 0]
            assert live.worker_connector.counters["tier_full"] > 0
        played.until(DUE)
        with monkeypatch.context() as patch:
            patch.setattr("os.ftruncate", _raising(OSError(number, "refused")))
            played.until(DUE)


@pytest.mark.parametrize("kind", ["disk", "redis", "s3"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "refused")], ids=["python", "system"])
def test_memory_is_refused_in_mid_run(
    kind: str, error: Exception, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a tier gets no memory for values or for a new client, hits are lost.

    When memory is free again, kvpipe uses the tier again.
    """
    with ExitStack() as stack:
        if kind == "disk":
            reported: dict[str, Any] = {"kind": "disk", "path": str(tmp_path), "bytes_max": "1GiB"}
        elif kind == "redis":
            reported = {"kind": "redis", "host": LOCAL, "port": stack.enter_context(serving("redis")).port}
        else:
            reported = s3_spec(shared()).model_dump(mode="json", exclude_none=True)
        live = stack.enter_context(engine(kvpipe=_config(reported), **OWN))
        played = Played(live, expected)
        with monkeypatch.context() as patch:
            patch.setattr("mmap.mmap", _raising(error))
            for _ in range(3):
                assert played.play() < DUE
        played.until(DUE)
        with monkeypatch.context() as patch:
            patch.setattr("mmap.mmap", _raising(error))
            assert [played.play() < DUE for _ in range(2)] == [True] * 2
        played.until(DUE)


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("kind", ["s3", "mooncake"])
def test_a_server_is_killed_in_mid_run(kind: str, expected: list[list[int]]) -> None:
    """While the server is dead, answers are the same and nothing stalls. After a restart there are hits again."""
    if kind == "s3":
        server = S3Server().start()
        made = s3_spec(server, timeout_ms_max=500)
        _in_mid_run(json.loads(made.model_dump_json(exclude_none=True)), server.kill, server.start, expected)
        server.kill()
        return
    with master() as one, node(one.address, 64 << 20):
        reported = json.loads(mooncake_spec(one).model_dump_json(exclude_none=True))
        _in_mid_run(reported, one.kill, None, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_changes_in_mid_run(
    kind: str, expected: list[list[int]], tmp_path: Path, trace_file: Path
) -> None:
    """A new certificate of the server is accepted.

    A certificate of another authority is reported, and there are no hits until the certificate is replaced.
    """
    with secured(kind, tmp_path / "tls") as server, engine(kvpipe=_config(server.keys), **OWN) as live:
        played = Played(live, expected)
        played.play()
        played.until(DUE)
        server.show("renewed")
        server.proxy.cut()
        played.until(DUE)
        server.show("other")
        server.proxy.cut()
        assert played.play() == 0
        server.show("first")
        played.until(DUE)
    assert any("certificate" in event.why for event in Trace(trace_file) if isinstance(event, TierLeft))


def _in_mid_run(
    tier: dict[str, Any], kill: Callable[[], object], start: Callable[[], object] | None, expected: list[list[int]]
) -> None:
    with engine(kvpipe=_config(tier), **OWN) as live:
        played = Played(live, expected)
        played.play()
        played.until(DUE)
        kill()
        assert played.play() == 0
        if start is not None:
            start()
            played.until(DUE)


@pytest.mark.parametrize(
    "tier",
    [
        pytest.param({"kind": "redis", "host": "no-such-host.invalid"}, id="no-name"),
        pytest.param({"kind": "redis", "host": LOCAL, "port": 1}, id="no-server"),
    ],
)
def test_a_tier_that_was_never_there(tier: dict[str, Any], expected: list[list[int]], tmp_path: Path) -> None:
    """If a tier cannot be reached, the engine starts without this tier and uses the next tier."""
    config = _config(tier, {"kind": "disk", "path": str(tmp_path / "kv")})
    with engine(kvpipe=config, **OWN) as live:
        played = Played(live, expected)
        played.play()
        played.until(DUE)
