"""A tier for kvpipe in a SQLite database that the engines of a host share.

The tier evicts the least recently used values.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import SplitResult, unquote

import anyio
from pydantic import ByteSize, Field

from kvpipe.inputs.values import LocalPath, Size
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written, blocking
from kvpipe.tiers.spec import TierSpec

SCHEMA = """
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS chunks
        (name TEXT UNIQUE NOT NULL, bytes INTEGER NOT NULL, used_s REAL NOT NULL, value BLOB NOT NULL);
    CREATE INDEX IF NOT EXISTS by_use ON chunks (used_s);
"""
NAMES_MAX = 500
"""The largest number of names in one statement. Every version of SQLite accepts at least 999."""

_T = TypeVar("_T")


class SqliteSpec(TierSpec):
    """The configuration keys of this tier, in addition to the keys of every tier."""

    place: ClassVar[tuple[str, ...]] = ("path",)

    kind: Literal["sqlite"] = "sqlite"
    path: LocalPath = Field(description="Absolute path of the database file, which is created if it does not exist.")
    bytes_max: Annotated[Size, Field(gt=0)] = Field(ByteSize(1 << 30), description="Largest total size of all values.")

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`. An example is sqlite:///var/cache/kv.db. The query may have further keys."""
        if url.netloc or not url.path.startswith("/"):
            raise ValueError("write sqlite:///ABSOLUTE/PATH")
        return {"path": unquote(url.path)}

    def make(self, name: str, *, writes: bool = True) -> SqliteTier:  # noqa: ARG002  (a connection costs nothing)
        """See `TierSpec.make`. With `store: never`, the tier does not create the database."""
        database = f"{self.path.as_uri()}?mode={'rw' if self.store == 'never' else 'rwc'}"
        return SqliteTier(name, database, int(self.bytes_max), self.lanes, self.timeout_ms_max / 1000)


class SqliteTier:
    """See `Tier`. Every call runs in a thread, with one of `lanes` connections."""

    def __init__(self, name: str, database: str, bytes_max: int, lanes: int, timeout_s: float) -> None:
        """Make a closed tier. `database`: the URI of the database.

        `timeout_s`: longest wait for another writer's lock.
        """
        self.name = name
        self._database, self._bytes_max, self._timeout_s = database, bytes_max, timeout_s
        self._threads = anyio.CapacityLimiter(lanes)
        self._idle: list[sqlite3.Connection] = []
        self._open = False

    async def open(self) -> None:
        """See `Tier.open`."""
        self._open = True
        await self._run(lambda db: db.executescript(SCHEMA))

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        return await self._run(partial(_exists, keys))

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`. A read makes a value the most recently used."""
        return await self._run(lambda db: [_read(db, get) for get in gets])

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        if any(put.size > self._bytes_max for put in puts):
            raise TierFullError(f"{self.name}: a value is larger than bytes_max={self._bytes_max}")
        return await self._run(lambda db: [_write(db, put, self._bytes_max) for put in puts])

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        one = "DELETE FROM chunks WHERE name = ?"
        return await self._run(lambda db: sum(db.execute(one, (key.text,)).rowcount for key in keys))

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`."""
        totals = "SELECT count(*), coalesce(sum(bytes), 0) FROM chunks"
        items, used = await self._run(lambda db: db.execute(totals).fetchone())
        return Capacity(items, used, self._bytes_max)

    async def health(self) -> None:
        """See `Tier.health`."""
        await self._run(lambda db: db.execute("SELECT 1 FROM chunks LIMIT 1").fetchone())

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`. Names are read page by page, so that a listing delays no other call."""
        last = ""
        while rows := await self._run(partial(_page, last)):
            for name, size, used_s in rows:
                yield Entry(Key.parse(name), size, max(0.0, time.time() - used_s))
            last = rows[-1][0]

    async def close(self) -> None:
        """See `Tier.close`."""
        self._open = False
        while self._idle:
            self._idle.pop().close()

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` as one transaction in a thread, and return its result. A cancellation interrupts the thread."""
        self._check_open()
        async with self._threads:  # each thread has its own connection, so that `interrupt` stops only this work
            try:
                db = self._idle.pop() if self._idle else self._connect()
                try:
                    done = await blocking(anyio.CapacityLimiter(1), partial(_committed, db, work), db.interrupt)
                except BaseException:
                    db.close()
                    raise
            except sqlite3.Error as error:
                full = getattr(error, "sqlite_errorcode", 0) in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}
                raise (TierFullError if full else TierError)(f"{self.name}: {self._database}: {error}") from error
        if self._open:
            self._idle.append(db)
        else:
            db.close()
        return done

    def _check_open(self) -> None:
        if not self._open:
            raise TierError(f"{self.name}: it is not open")

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._database, self._timeout_s, isolation_level=None, check_same_thread=False, uri=True)


def _committed(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
    db.execute("BEGIN IMMEDIATE")
    with db:
        return work(db)


def _exists(keys: Sequence[Key], db: sqlite3.Connection) -> list[bool]:
    names, there = [key.text for key in keys], set[str]()
    for at in range(0, len(names), NAMES_MAX):
        part = names[at : at + NAMES_MAX]
        rows = db.execute(f"SELECT name FROM chunks WHERE name IN ({','.join('?' * len(part))})", part)  # noqa: S608
        there.update(name for (name,) in rows)
    return [name in there for name in names]


def _page(after: str, db: sqlite3.Connection) -> list[tuple[str, int, float]]:
    page = "SELECT name, bytes, used_s FROM chunks WHERE name > ? ORDER BY name LIMIT ?"
    return db.execute(page, (after, NAMES_MAX)).fetchall()


def _read(db: sqlite3.Connection, get: Get) -> Read:
    row = db.execute("SELECT rowid, bytes FROM chunks WHERE name = ?", (get.key.text,)).fetchone()
    if row is None:
        return Read.MISS
    if row[1] != get.size:
        return Read.DAMAGED
    with db.blobopen("chunks", "value", row[0], readonly=True) as blob:
        for part in get.into:
            part[:] = blob.read(part.nbytes)
    db.execute("UPDATE chunks SET used_s = ? WHERE rowid = ?", (time.time(), row[0]))
    return Read.HIT


def _write(db: sqlite3.Connection, put: Put, bytes_max: int) -> Written:
    now_s = time.time()
    if db.execute("UPDATE chunks SET used_s = ? WHERE name = ?", (now_s, put.key.text)).rowcount:
        return Written.PRESENT
    (used,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM chunks").fetchone()
    while used + put.size > bytes_max:
        oldest, size = db.execute("SELECT rowid, bytes FROM chunks ORDER BY used_s LIMIT 1").fetchone()
        db.execute("DELETE FROM chunks WHERE rowid = ?", (oldest,))
        used -= size
    value = b"".join(put.parts)
    db.execute(
        "INSERT INTO chunks (name, bytes, used_s, value) VALUES (?, ?, ?, ?)", (put.key.text, put.size, now_s, value)
    )
    return Written.STORED
