"""The tier of this package keeps kvpipe's protocol, and drops the oldest values when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvpipe_sqlite_tier import SqliteSpec

from kvpipe.testing.buffers import put, some_key
from kvpipe.testing.tier_conformance import TierConformance, TierWorld, client, run
from kvpipe.tiers.base import TierFullError


class TestSqlite(TierConformance):
    """All claims of kvpipe's own."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> TierWorld:
        """Set up an empty database."""
        spec = SqliteSpec.model_validate({"path": tmp_path / "kv.db"})
        return TierWorld(lambda: spec.make("sqlite"), spec)


def test_the_oldest_go_first(tmp_path: Path) -> None:
    """What fits stays, in the order of its last use; a value that never fits is refused."""
    spec = SqliteSpec.model_validate({"path": tmp_path / "kv.db", "bytes_max": 3 * 4096})

    async def play() -> None:
        async with client(TierWorld(lambda: spec.make("sqlite"), spec)) as tier:
            await tier.write([put(i, 4096) for i in range(3)])
            await tier.write([put(0, 4096)])  # it is there: used again
            await tier.write([put(3, 4096)])
            assert await tier.exists([some_key(i) for i in range(4)]) == [True, False, True, True]
            with pytest.raises(TierFullError):
                await tier.write([put(4, 4 * 4096)])

    run(play)
