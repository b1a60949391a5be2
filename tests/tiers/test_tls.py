"""Certificates that change while a tier is connected are handled."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.buffers import content, data, get, put, some_key
from kvpipe.testing.tier_conformance import TierWorld, client, run
from kvpipe.tiers.base import Read, Tier, TierError, Written
from kvpipe.tiers.registry import parse_tier
from tests.rigs.servers.secured import KINDS, Secured, secured

SIZE = 65536


def use(kind: str, folder: Path, play: Callable[[Secured, Tier], Coroutine[Any, Any, None]]) -> None:
    """Run `play` with a TLS server and an open client of it. The server has no values under the test's keys."""

    async def opened(server: Secured) -> None:
        spec = parse_tier(server.keys | {"timeout_ms_max": 10_000})
        async with client(TierWorld(lambda: spec.make(kind), spec)) as tier:
            await tier.delete([some_key(1), some_key(2)])  # other tests use the same server
            await play(server, tier)

    with secured(kind, folder) as server:
        run(opened, server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_that_changes(kind: str, tmp_path: Path) -> None:
    """A new certificate of the same authority is used at once.

    A certificate of another authority is refused in one sentence.
    """

    async def play(server: Secured, tier: Tier) -> None:
        assert await tier.write([put(1, SIZE)]) == [Written.STORED]
        server.show("renewed")
        assert await tier.read([get(1, SIZE)]) == [Read.HIT], "an existing connection continues"
        server.proxy.cut()
        wanted = get(1, SIZE)
        assert await tier.read([wanted]) == [Read.HIT]
        assert data(wanted.into) == content(1, SIZE)
        server.show("other")
        server.proxy.cut()
        for call in (lambda: tier.exists([some_key(1)]), lambda: tier.read([get(1, SIZE)]),
                     lambda: tier.write([put(2, SIZE)]), tier.health):  # fmt: skip
            with pytest.raises(TierError, match="certificate"):
                await call()
        server.show("first")
        await tier.health()
        assert await tier.read([get(1, SIZE)]) == [Read.HIT]

    use(kind, tmp_path, play)


@pytest.mark.parametrize("kind", KINDS)
def test_an_authority_that_changes(kind: str, tmp_path: Path) -> None:
    """When the client's file has the new authority, the tier works again without being opened again."""

    async def play(server: Secured, tier: Tier) -> None:
        await tier.write([put(1, SIZE)])
        server.show("other")
        server.proxy.cut()
        with pytest.raises(TierError, match="certificate"):
            await tier.health()
        server.trust("other")
        await tier.health()
        assert await tier.read([get(1, SIZE)]) == [Read.HIT]

    use(kind, tmp_path, play)
