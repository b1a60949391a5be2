"""`kvpipe cache purge` prints the selected values, and then deletes exactly these values."""

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

from kvpipe.cli.cache import Findings, TierCommand, _purge
from kvpipe.testing.buffers import some_key
from kvpipe.testing.dict_tier import DictTier
from kvpipe.tiers.base import Key
from kvpipe.tiers.envelope import HEADER_BYTES, VERSION
from kvpipe.tiers.registry import parse_tier
from tests.cli.test_cache import BODY, KEYS, ONE, TWO, Stated, file_of, fill, flip
from tests.rigs.servers.redis import serving
from tests.rigs.servers.sockets import LOCAL


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Stated:
    """Return an object that runs the command and keeps its output."""
    return Stated(capsys)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """Return the path of a disk tier that holds KEYS."""
    fill(f"{tmp_path}/kv?bytes_max=1GiB")
    return str(tmp_path / "kv")


def test_purge_deletes_the_reported_values(cache: Stated, disk: str) -> None:
    """Values are selected by namespace, by age, or by both. Otherwise all are selected.

    Without `--delete` the values are only counted.
    """
    hours_ago = time.time() - 7200
    for key in (KEYS[0], KEYS[1], KEYS[5]):
        os.utime(file_of(disk, key), (hours_ago, hours_ago))
    size = HEADER_BYTES + BODY
    old = "purge", disk, "--older-than", "1h"
    of_one, of_two = ({"namespace": space, "items": n, "bytes": n * size} for space, n in ((ONE, 2), (TWO, 1)))
    found = cache.json(*old, "--namespace", ONE, "--delete")
    assert found == {"tier": "disk", "dropped": 2, "bytes": 2 * size}
    why = "of one namespace, not used for 1.0 h"
    plan = {"tier": "disk", "will_drop": 2, "bytes": 2 * size, "why": why, "namespaces": [of_one]}
    assert cache.plan == plan
    why = "of all namespaces, not used for 1.0 h"
    would = {"tier": "disk", "would_drop": 1, "bytes": size, "why": why, "namespaces": [of_two]}
    assert cache.json(*old, "--dry-run") == would
    os.utime(file_of(disk, KEYS[5]), (hours_ago, hours_ago))
    assert cache.json(*old) == would
    os.utime(file_of(disk, KEYS[5]), (hours_ago, hours_ago))
    assert cache.json(*old, "--delete")["dropped"] == 1
    assert cache.json(*old, "--delete")["dropped"] == 0
    assert cache.json("purge", disk, "--namespace", ONE, "--delete")["dropped"] == 3
    assert cache.json("purge", disk, "--all")["would_drop"] == 4
    assert {one["key"] for one in cache.json("ls", disk)["values"]} == {key.text for key in KEYS[6:]}
    assert cache("purge", disk, "--all", "--delete") == 0
    assert cache.out.index("will drop") < cache.out.index("dropped")
    assert cache.json("stats", disk)["items"] == 0


OLD = [some_key(i, space) for space in ("3" * 32, "4" * 32) for i in range(4)]


def first_format(key: Key, body: bytes) -> bytes:
    """Return a value of the previous format, which version 0.1 wrote."""
    text, header = key.text.encode(), bytearray(HEADER_BYTES)
    struct.pack_into(
        "<8sHBBIQ12s192s", header, 0, b"kvpipe\r\n", 1, 0, len(text), 4, len(body), bytes(12), text
    )  # fmt: skip
    header[-24:-8] = xxhash.xxh3_128_digest(body)
    header[-8:] = xxhash.xxh3_64_digest(bytes(header[:-8]))
    return bytes(header) + body


def test_purge_deletes_values_of_an_older_format(cache: Stated, disk: str) -> None:
    """One value of a namespace shows the format of all values of the namespace. Values of this version stay.

    Only values that the command has read count as used.
    """
    for key in OLD:
        file = Path(disk) / key.namespace / key.chunk[:1].hex() / key.text
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(first_format(key, bytes(BODY)))
    flip(file_of(disk, OLD[0]), 100)
    size = HEADER_BYTES + BODY
    stale = "purge", disk, "--stale"
    assert cache.json(*stale, "--older-than", "1h")["would_drop"] == 0
    hours_ago = time.time() - 7200
    for key in KEYS:
        os.utime(file_of(disk, key), (hours_ago, hours_ago))
    found = cache.json(*stale, "--namespace", "3" * 32)
    assert (found["would_drop"], found["bytes"]) == (4, 4 * size)
    assert cache.json(*stale, "--namespace", "4" * 32, "--delete")["dropped"] == 4
    assert cache.json(*stale, "--delete") == {"tier": "disk", "dropped": 4, "bytes": 4 * size}
    assert {one["key"] for one in cache.json("ls", disk)["values"]} == {key.text for key in KEYS}
    assert cache.json("purge", disk, "--older-than", "1h")["would_drop"] == len(KEYS) - 2


def later_format(key: Key, body: bytes) -> bytes:
    """Return a value of a later format, as far as a test can guess that format."""
    value = bytearray(first_format(key, body))
    value[8:10] = (VERSION + 1).to_bytes(2, "little")
    value[HEADER_BYTES - 8 : HEADER_BYTES] = xxhash.xxh3_64_digest(bytes(value[: HEADER_BYTES - 8]))
    return bytes(value)


def test_purge_keeps_values_of_newer_formats() -> None:
    """`--stale` selects only values that are certainly of an older format.

    The command counts and keeps all other values.
    """
    tier, report = DictTier(), Findings()
    keys = [some_key(i, str(i) * 32) for i in range(3, 6)]
    values = later_format(keys[0], bytes(BODY)), first_format(keys[1], bytes(BODY)), b"not kvpipe's".ljust(BODY)
    tier.values = {key.text: value for key, value in zip(keys, values, strict=True)}
    args = argparse.Namespace(namespace=None, older_than=None, delete=True, stale=True, force=False)
    assert anyio.run(_purge, TierCommand(tier, parse_tier("/x"), args, lambda: None, print), report) == 0
    assert report == {"dropped": 1, "bytes": HEADER_BYTES + BODY, "kept_unjudged": 2}
    assert set(tier.values) == {keys[0].text, keys[2].text}


def test_purge_drops_older_formats_from_redis(cache: Stated) -> None:
    """`--stale` works with every tier that can list its values, such as Redis."""
    name, value = f"kvpipe:{OLD[0].text}".encode(), first_format(OLD[0], bytes(BODY))
    with serving("redis") as server, socket.create_connection((LOCAL, server.port)) as wire:
        where = f"redis://{LOCAL}:{server.port}"
        fill(where)
        wire.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(name), name))
        wire.sendall(b"$%d\r\n%s\r\n" % (len(value), value))
        assert wire.recv(64) == b"+OK\r\n"
        assert cache.json("purge", where, "--stale", "--delete") == {
            "tier": "redis",
            "dropped": 1,
            "bytes": HEADER_BYTES + BODY,
        }
        assert cache.json("stats", where)["items"] == len(KEYS)
