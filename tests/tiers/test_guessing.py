"""An attacker reads an encrypted tier, knows the model and guesses a prompt, but cannot confirm the guess.

The attack computes all names and marks that need no secret, and looks for them in the tier. In a tier without
encryption, the same attack confirms each guess.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.testing.held_tier import DictSpec
from kvpipe.testing.tier_conformance import TierWorld, client
from kvpipe.tiers.base import Get, Key, Read, Tier
from kvpipe.tiers.envelope import HEADER_BYTES, Sealer, pages
from kvpipe.tiers.finder import Finder
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.tiers.keyring import encryption_key
from tests.rigs.tier_worlds import WORLDS
from tests.tiers.test_carrier import CHUNK, SPACE, Rank
from tests.tiers.test_finder import _ask

OLD, NEW = "TEST_OLD_KEY", "TEST_NEW_KEY"
KEY = Key(SPACE, CHUNK, 0, 0, 1)


@pytest.fixture(params=["disk", "redis", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierWorld]:
    """Return an empty store, and two encryption keys in the environment, alone and in both orders."""
    old, new = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
    for name, text in {OLD: old, NEW: new, f"{NEW}_FIRST": f"{new} {old}", f"{OLD}_FIRST": f"{old}\n{new}"}.items():
        monkeypatch.setenv(name, text)
    with WORLDS[request.param](tmp_path) as made:
        yield made


@contextmanager
def rank(world: TierWorld, variable: str) -> Iterator[Rank]:
    """Return a rank that encrypts with the key in `variable`, or a rank without encryption."""
    spec: dict[str, Any] = {"encryption_key_env": variable} if variable else {}
    made = Rank([world.make()], **spec)
    try:
        yield made
    finally:
        made.carrier.shutdown()


def store(world: TierWorld, variable: str) -> bytes:
    """Store a chunk of every cache group, and return the content of its slot."""
    with rank(world, variable) as one:
        body = one.fill(0, 1).numpy().tobytes()
        one.carry(stores=True, slot=0)
        one.carry(stores=True, slot=0, group=1)
        assert one.ended(2) == [True, True]
    return body


def fetch(world: TierWorld, variable: str) -> bytes:
    """Return the fetched bytes of the chunk's first group, or b"" for a miss. Check that a miss is no fault."""
    with rank(world, variable) as one:
        one.fill(3, 2)
        one.carry(stores=False, slot=3)
        (ok,) = one.ended()
        assert not one.counters.faults
        return one.pool.slot(3).numpy().tobytes() if ok else b""


def found(world: TierWorld, variable: str) -> bool:
    """Return whether a lookup of the scheduler side finds the chunk."""
    spec = DictSpec.model_validate({"encryption_key_env": variable})
    finder = Finder(guarded([("tier", spec, world.make())], (FIND,)), ranks=1, units_per_chunk=4, fault=print)
    try:
        return bool(_ask(finder, [(0, 4)], keys=[CHUNK] * 4, space=SPACE).found)
    finally:
        finder.stop()


def read_all(world: TierWorld) -> dict[str, bytes]:
    """Return every name and value in the store, as a reader of the store sees them."""
    out: dict[str, bytes] = {}

    async def play() -> None:
        async with client(world) as tier:
            async for entry in tier.scan():
                out[entry.key.text] = await _value(tier, entry.key, entry.bytes)

    anyio.run(play)
    return out


async def _value(tier: Tier, key: Key, size: int) -> bytes:
    header, body = pages(HEADER_BYTES), pages(size - HEADER_BYTES)
    assert await tier.read([Get(key, (header, body))]) == [Read.HIT]
    return bytes(header) + bytes(body)


def guesses(body: bytes) -> Iterator[bytes]:
    """Yield the values that an attacker expects in the store.

    The attacker knows the model, the prompt, its KV and how kvpipe works.
    """
    texts = [SPACE.encode(), CHUNK, CHUNK.hex().encode(), KEY.text.encode()]
    yield from texts
    for text in texts:
        for kind in (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b):
            digest = kind(text).digest()
            yield from (digest[:16], digest[:16].hex().encode())
    for secret in (bytes(32), b"\xff" * 32, CHUNK, hashlib.sha256(SPACE.encode()).digest()):
        made = encryption_key(secret)
        yield from (made.mark, made.name(KEY).chunk.hex().encode(), made.name(KEY).namespace.encode())
    yield from (body[at : at + 64] for at in range(0, 2048, 256))


def confirmed(world: TierWorld, body: bytes) -> list[bytes]:
    """Return the guesses that the store confirms."""
    seen = [text for name, value in read_all(world).items() for text in (name.encode(), value)]
    assert seen
    return [guess for guess in guesses(body) if any(guess in text for text in seen)]


def test_guesses_of_a_plain_tier_are_confirmed(world: TierWorld) -> None:
    """Without an encryption key, the attack recognizes prompt, model and bytes."""
    body = store(world, "")
    plain = confirmed(world, body)
    assert {SPACE.encode(), CHUNK.hex().encode(), KEY.text.encode(), body[:64]} <= set(plain)


def test_guesses_of_an_encrypted_tier_are_not(world: TierWorld) -> None:
    """The attack recognizes nothing. Two parts of one chunk have only the mark of their key in common."""
    body = store(world, OLD)
    assert confirmed(world, body) == []
    (one, first), (other, second) = read_all(world).items()
    a, b = Key.parse(one), Key.parse(other)
    assert a.chunk != b.chunk
    assert (a.group, a.rank, a.ranks) == (b.group, b.rank, b.ranks) == (0, 0, 1)
    assert first[24:40] == second[24:40], "the mark"
    assert first[40:72] != second[40:72], "the salt"


def test_another_secret_has_other_names(world: TierWorld) -> None:
    """Two tenants with different keys store one chunk.

    Each tenant finds only its own value, and both values are kept.
    """
    body = store(world, OLD)
    assert not found(world, NEW)
    assert fetch(world, NEW) == b""
    store(world, NEW)
    assert len(read_all(world)) == 4
    assert fetch(world, NEW)[:1024] == fetch(world, OLD)[:1024] == body[:1024]


def test_a_key_is_changed_while_values_are_kept(world: TierWorld) -> None:
    """An engine with the new key first and the old key second finds old values.

    An engine with only the new key reads values that were written with the new key.
    """
    body = store(world, OLD)
    for ring in (f"{NEW}_FIRST", f"{OLD}_FIRST"):
        assert found(world, ring)
        assert fetch(world, ring)[:1024] == body[:1024]
    assert not found(world, NEW)
    assert fetch(world, NEW) == b""
    store(world, f"{NEW}_FIRST")
    assert found(world, NEW)
    assert fetch(world, NEW)[:1024] == body[:1024]
    assert found(world, OLD), "an engine with only the old key still finds old values"


def test_names_do_not_depend_on_the_values_around_them() -> None:
    """Processes with the same secret derive the same name from a key, so they can share values."""
    secret = os.urandom(32)
    assert Sealer([secret]).names(KEY) == Sealer([secret]).names(KEY)
    others: list[Any] = [KEY._replace(**{field: value}) for field, value in _CHANGES.items()]
    assert len({Sealer([secret]).names(one)[0].chunk for one in [KEY, *others]}) == 1 + len(others)


_CHANGES: dict[str, Any] = {"namespace": "1" * 32, "chunk": bytes(32), "group": 1, "rank": 1, "ranks": 2}
