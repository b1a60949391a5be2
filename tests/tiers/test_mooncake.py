"""Tests of the Mooncake tier with a real master: its configuration, and values that clients share."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from functools import partial
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from kvpipe.errors import ConfigError
from kvpipe.testing.buffers import content, data, get, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers.base import Read, Written
from kvpipe.tiers.mooncake import tier as mooncake
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from tests.rigs.servers.mooncake import Master, master, node
from tests.tiers.mooncake_clients import KIB, LENDS, MIB, QUICK, client, fails, soon, stored

# ---- configuration ------------------------------------------------------------------------------------------------


def test_a_url_shows_where_the_master_is() -> None:
    """A URL names the master, and the URL's query gives the other keys.

    By default members find each other without a further server.
    """
    given = MooncakeSpec.parse_url(urlsplit("mooncake://kv-master:50051?segment_bytes=8GiB&replicas=2"))
    spec = MooncakeSpec.model_validate(given)
    assert (spec.master, spec.segment_bytes, spec.replicas) == ("kv-master:50051", 8 << 30, 2)
    assert (spec.metadata_server, spec.protocol) == ("P2PHANDSHAKE", "tcp")
    assert MooncakeSpec.from_url(urlsplit("mooncake://[::1]:50051/")) == {"master": "[::1]:50051"}


@pytest.mark.parametrize(
    "url", ["mooncake://host", "mooncake://:50051", "mooncake://me:secret@host:1", "mooncake://host:1/x", "mooncake://"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    """A URL without a port, or with more than host and port, is refused.

    The message shows the right form, but no secret.
    """
    with pytest.raises(ValueError, match="expected mooncake://HOST:PORT") as refused:
        MooncakeSpec.from_url(urlsplit(url))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "wrong", "why"),
    [
        ("master", "host", "write HOST:PORT"),
        ("master", "", "write HOST:PORT"),
        ("metrics", "host:99999", "write HOST:PORT"),
        ("metadata_server", "redis://:pass@host", "MC_REDIS_PASSWORD"),
        ("segment_bytes", "-1", "could not parse value and unit"),
        ("segment_bytes", True, "expected a number"),
        ("buffer_bytes", 4096, "greater than or equal"),
        ("replicas", 0, "greater than 0"),
        ("protocol", "udp", "'tcp' or 'rdma'"),
    ],
)
def test_a_wrong_key_is_refused(key: str, wrong: object, why: str) -> None:
    """An impossible value is refused before the engine starts, and the message names the key and the reason."""
    with pytest.raises(ValidationError) as refused:
        MooncakeSpec.model_validate({"master": "host:1", key: wrong})
    (problem,) = refused.value.errors()
    assert problem["loc"] == (key,)
    assert why in problem["msg"]


def test_missing_client_or_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client or a system library is missing, the message names what to install."""
    spec = MooncakeSpec.model_validate({"master": "host:1"})

    def missing(name: str) -> None:
        raise OSError(name)

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", missing)
        with pytest.raises(ConfigError, match="libibverbs1"):
            spec.make("mooncake")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvpipe\[mooncake\]'"):
        spec.make("mooncake")


def test_the_client_is_bounded_and_quiet_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own timeouts follow timeout_ms_max, and its log is discarded.

    If the user has set these values, they are kept.
    """
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    made = mooncake._environment(1500)
    assert (made["MC_RPC_TIMEOUT_MS"], made["MC_TCP_PROGRESS_TIMEOUT_SEC"]) == ("1500", "2")
    assert mooncake._log() == subprocess.DEVNULL
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "9")
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    assert mooncake._environment(1500)["MC_RPC_TIMEOUT_MS"] == "9"
    assert mooncake._log() is None


# ---- sharing ------------------------------------------------------------------------------------------------------


def test_lent_memory_is_shared_until_its_owner_closes() -> None:
    """Values in one client's lent memory are hits for other clients. After this client has closed, they are misses."""

    async def play(of: Master) -> None:
        async with client(of) as other, client(of, writes=False) as reader:
            await fails(partial(other.write, [put(1, MIB)]), "no room")
            async with client(of, **LENDS) as owner:
                assert await other.write([put(1, MIB)]) == [Written.STORED]
                assert await owner.write([put(2, MIB)]) == [Written.STORED]
                for tier in (owner, other, reader):
                    gets = [get(1, MIB), get(2, MIB)]
                    assert await tier.read(gets) == [Read.HIT] * 2
                    assert [data(one.into) for one in gets] == [content(1, MIB), content(2, MIB)]
                await fails(partial(reader.write, [put(3, MIB)]), "only look up and read values")
                assert (await reader.capacity()).bytes_max == 64 * MIB
            assert await reader.exists([some_key(1), some_key(2)]) == [False] * 2
            assert await other.read([get(1, MIB)]) == [Read.MISS]

    with master() as of:
        run(play, of)


def test_a_replica_outlives_the_owner_of_the_other() -> None:
    """With replicas=2, a value can still be read after one of its two owners was killed."""

    async def play(of: Master, first: subprocess.Popen[str]) -> None:
        async with client(of, replicas=2, **QUICK) as tier:
            puts = [put(i, 256 * KIB) for i in range(4)]
            await stored(tier, *puts)
            first.kill()
            gets = [get(i, 256 * KIB) for i in range(4)]
            await soon(partial(tier.read, gets), [Read.HIT] * 4)
            assert [data(one.into) for one in gets] == [content(i, 256 * KIB) for i in range(4)]

    with master("--client_ttl=2") as of, node(of.address, 64 * MIB) as first, node(of.address, 64 * MIB):
        run(play, of, first)


def test_values_of_other_programs_are_not_listed() -> None:
    """The cluster has values of other programs, of any number and name. A listing leaves these values out."""
    script = (
        "import sys; from mooncake.store import MooncakeDistributedStore as S; s = S();"
        "s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 20, 'tcp', '', sys.argv[1]);"
        "c = max(s.put(f'{i}' + 'x' * 600, b'x' * 4096) for i in range(600));"
        "print(c, flush=True); import os; os._exit(c)"
    )

    async def play(of: Master) -> None:
        async with client(of) as tier:
            await tier.write([put(1, 8192)])
            assert [(entry.key, entry.bytes) async for entry in tier.scan()] == [(some_key(1), 8192)]
            assert (await tier.capacity()).items == 601
        async with client(of, metrics="") as blind:
            await fails(blind.capacity, "set `metrics`")

    with master() as of, node(of.address, 64 * MIB):
        subprocess.run([sys.executable, "-c", script, of.address], check=True, capture_output=True)
        run(play, of)
