"""`kvpipe cache purge --stale`: values of formats before this one go, and nothing else."""

from __future__ import annotations

import argparse
import os
import socket
import struct
import time
from pathlib import Path

import anyio
import pytest
import xxhash

from kvpipe.cli.cache import Report, TierCommand, _purge
from kvpipe.testing.buffers import some_key
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.servers.redis import serving
from kvpipe.testing.servers.sockets import LOCAL
from kvpipe.tiers.base import Key
from kvpipe.tiers.envelope import HEADER_BYTES, VERSION
from kvpipe.tiers.registry import parse_tier
from tests.cli.test_cache import BODY, KEYS, Stated, file_of, fill, flip


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Stated:
    """Return what calls the command, and remembers what it printed."""
    return Stated(capsys)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """Return the path of a disk tier that holds KEYS."""
    fill(f"{tmp_path}/kv?bytes_max=1GiB")
    return str(tmp_path / "kv")


OLD = [some_key(i, space) for space in ("3" * 32, "4" * 32) for i in range(4)]


def first_format(key: Key, body: bytes) -> bytes:
    """Return a value of the format before this one, as version 0.1 wrote it."""
    text, header = key.text.encode(), bytearray(HEADER_BYTES)
    struct.pack_into(
        "<8sHBBIQ12s192s", header, 0, b"kvpipe\r\n", 1, 0, len(text), 4, len(body), bytes(12), text
    )  # fmt: skip
    header[-24:-8] = xxhash.xxh3_128_digest(body)
    header[-8:] = xxhash.xxh3_64_digest(bytes(header[:-8]))
    return bytes(header) + body


def test_purge_drops_what_is_of_an_older_format(cache: Stated, disk: str) -> None:
    """What this version wrote stays, and keeps its age but for one value of a namespace; so does what is spoilt."""
    for key in OLD:
        file = Path(disk) / key.namespace / key.chunk[:1].hex() / key.text
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(first_format(key, bytes(BODY)))
    flip(file_of(disk, OLD[0]), 100)
    size, kept = HEADER_BYTES + BODY, {"kept_of_unknown_format": 1}
    stale = "purge", disk, "--stale"
    assert cache.json(*stale, "--older-than", "1h") == {"tier": "disk", "dropped": 0, "bytes": 0}
    hours_ago = time.time() - 7200
    for key in KEYS:
        os.utime(file_of(disk, key), (hours_ago, hours_ago))
    assert (
        cache.json(*stale, "--namespace", "3" * 32, "--dry-run")
        == {"tier": "disk", "would_drop": 3, "bytes": 3 * size} | kept
    )
    assert cache.json(*stale, "--namespace", "4" * 32) == {"tier": "disk", "dropped": 4, "bytes": 4 * size}
    assert cache.json(*stale) == {"tier": "disk", "dropped": 3, "bytes": 3 * size} | kept
    assert {one["key"] for one in cache.json("ls", disk)["values"]} == {key.text for key in [*KEYS, OLD[0]]}
    assert cache.json("purge", disk, "--older-than", "1h", "--dry-run")["would_drop"] == len(KEYS) - 2


def test_purge_keeps_formats_to_come() -> None:
    """What a later version has written is not this one's to drop, whatever it means."""
    tier, report = DictTier(), Report()
    value = bytearray(first_format(OLD[0], bytes(BODY)))
    value[8:10] = (VERSION + 1).to_bytes(2, "little")
    value[HEADER_BYTES - 8 : HEADER_BYTES] = xxhash.xxh3_64_digest(bytes(value[: HEADER_BYTES - 8]))
    tier.values = {OLD[0].text: bytes(value), OLD[1].text: first_format(OLD[1], bytes(BODY)), OLD[2].text: b"short"}
    args = argparse.Namespace(namespace=None, older_than=None, dry_run=False, stale=True)
    assert anyio.run(_purge, TierCommand(tier, parse_tier("/x"), args, lambda: None), report)
    assert report == {"dropped": 1, "bytes": HEADER_BYTES + BODY, "kept_of_unknown_format": 2}
    assert set(tier.values) == {OLD[0].text, OLD[2].text}


def test_purge_drops_older_formats_from_redis(cache: Stated) -> None:
    """From whatever tier can list its values."""
    name, value = f"kvpipe:{OLD[0].text}".encode(), first_format(OLD[0], bytes(BODY))
    with serving("redis") as server, socket.create_connection((LOCAL, server.port)) as wire:
        where = f"redis://{LOCAL}:{server.port}"
        fill(where)
        wire.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(name), name))
        wire.sendall(b"$%d\r\n%s\r\n" % (len(value), value))
        assert wire.recv(64) == b"+OK\r\n"
        assert cache.json("purge", where, "--stale") == {"tier": "redis", "dropped": 1, "bytes": HEADER_BYTES + BODY}
        assert cache.json("stats", where)["items"] == len(KEYS)
