"""Tests that this package's tier obeys kvpipe's protocol, and evicts the least recently used values when it is full."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from kvpipe_sqlite_tier import SqliteSpec

from kvpipe.testing.buffers import put, some_key
from kvpipe.testing.tier_conformance import TierConformance, TierWorld, client, run
from kvpipe.tiers.base import TierError, TierFullError


@contextmanager
def broken(path: Path) -> Iterator[None]:
    """Rename the table, so that the tier's calls fail. At the end, give the table its old name."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("ALTER TABLE chunks RENAME TO away")
        yield
        db.execute("DROP TABLE IF EXISTS chunks")
        db.execute("ALTER TABLE away RENAME TO chunks")


class TestSqlite(TierConformance):
    """All tests of kvpipe's conformance suite for tiers."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> TierWorld:
        """Set up an empty database."""
        spec = SqliteSpec.model_validate({"path": tmp_path / "kv.db"})
        return TierWorld(lambda: spec.make("sqlite"), spec, broken=partial(broken, spec.path))


def test_the_oldest_go_first(tmp_path: Path) -> None:
    """The least recently used value is evicted first. A value larger than the tier is refused."""
    spec = SqliteSpec.model_validate({"path": tmp_path / "kv.db", "bytes_max": 3 * 4096})

    async def play() -> None:
        async with client(TierWorld(lambda: spec.make("sqlite"), spec)) as tier:
            await tier.write([put(i, 4096) for i in range(3)])
            await tier.write([put(0, 4096)])  # writing a value that the tier already has counts as a use
            await tier.write([put(3, 4096)])
            assert await tier.exists([some_key(i) for i in range(4)]) == [True, False, True, True]
            with pytest.raises(TierFullError):
                await tier.write([put(4, 4 * 4096)])

    run(play)


def test_a_tier_that_never_stores_makes_no_database(tmp_path: Path) -> None:
    """`kvpipe cache` opens tiers with `store: never`, so a misspelt path must be an error and not an empty tier."""
    spec = SqliteSpec.model_validate({"path": tmp_path / "kv.db", "store": "never"})

    async def play() -> None:
        with pytest.raises(TierError):
            await spec.make("sqlite").open()

    run(play)
    assert not spec.path.exists()
