"""Measures eight engines on one memory, each in its own process: lookups, and deaths of an engine and the holder.

The holder and its socket are real. Engines copy no bytes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.node_forks import FORKS
from benchmarks.node_lookups import CHUNKS, SLOT_BYTES, Lookups, Times, hashes, new_times
from benchmarks.report import Figure
from kvpipe.cache.chunks import Owner
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.client import NodePool, NodePoolOptions
from kvpipe.node.processes import holder_of
from kvpipe.statemachine.node_link import ATTACHED
from kvpipe.trace.log import Counters

CLIENTS: Final = 8
SLOTS: Final = 8 * CHUNKS
WARM_S, LOOK_S, WINDOW_S = 0.5, 4.0, 0.6
DEATHS: Final = 5
HOLDERS: Final = 5
SAVE_EVERY: Final = 8
"""Each client saves a chunk in every eighth round. So the other clients read a journal that grows."""


class Client:
    """One engine's catalogs, and the orders that its process carries out."""

    def __init__(self, folder: Path, number: int) -> None:
        """Attach to the folder's memory. The client with number 0 saves the prompt."""
        self._folder, self._number, self._saved = folder, number, 0
        self.pool = NodePool(NodePoolOptions(folder, b"n" * 32, SLOTS, SLOT_BYTES, keep_s=5))
        while self.pool.state != ATTACHED:
            self.pool.poll()
            time.sleep(0.002)
        self.catalog = NodeCatalog(self.pool, 1, Counters(), 16)
        self.catalog.name_space("bench")
        self.lookups = Lookups(self.catalog)
        if number == 0:
            self.lookups.fill(self.catalog)
        while not self.lookups.found():
            time.sleep(0.002)

    def look(self, seconds: float) -> Times:
        """Look prompts up for some time, and return the times."""
        taken, until, rounds = new_times(), time.monotonic() + seconds, 0
        while time.monotonic() < until:
            self.lookups.round(taken)
            rounds += 1
            if rounds % SAVE_EVERY == 0:
                self._save()
        return dict(taken)

    def _save(self) -> bytes:
        """Save one chunk if the stock has a slot. Returns the chunk's key, or b""."""
        chunk = self.catalog.reserve(0)
        if chunk is None:
            return b""
        self._saved += 1
        key = hashes(f"{self._number} {self._saved}", 1)[-1]
        self.catalog.landed(self.catalog.write(chunk, 16, key, keep=True))
        return key

    def hold(self, _: float) -> None:
        """Lease the whole prompt, and begin to write half of the stock."""
        finder, request = self.lookups.finders["shared"], self.lookups.requests["hit"]
        self.catalog.lease(Owner("r", 1), [*filter(None, finder.chunks(0, request.block_hashes, 0, 16 * CHUNKS))])
        for _ in range(self.pool.stock.free // 2):
            self.catalog.reserve(0)
        self.catalog.end_step()

    def serve(self, seconds: float) -> None:
        """Take steps without requests."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.catalog.end_step()
            time.sleep(0.002)

    def outlive(self, seconds: float) -> float:
        """Kill the holder, save a chunk, and return the time until the chunk is published. Then serve for a while.

        Requests find only published chunks. The stock is used up before the kill, so that the save needs a grant from a
        new holder.
        """
        self.serve(0.2)
        while self._save():
            pass
        began = time.monotonic()
        if holder := holder_of(self._folder):
            os.kill(holder, signal.SIGKILL)
        keys, took = list[bytes](), 0.0
        while not took:
            self.catalog.end_step()
            keys += [key] if not keys and (key := self._save()) else []
            chunk = self.catalog.find(0, keys[0]) if keys else None
            took = time.monotonic() - began if chunk is not None and chunk.is_published else 0.0
            time.sleep(0.001)
        self.serve(began + seconds - time.monotonic())
        return took


def main(folder: Path, number: int, orders: Connection) -> None:
    """Carry out orders until the connection is closed."""
    client = Client(folder, number)
    orders.send("attached")
    while True:
        try:
            order, seconds = orders.recv()
        except EOFError:
            return
        orders.send(getattr(client, order)(seconds))


class Clients:
    """The processes of all clients."""

    def __init__(self, folder: Path) -> None:
        """Start the clients. The first client starts the holder and saves the prompt."""
        self._folder = folder
        self.all = [self.start(0)]
        self.all += [self.start(number) for number in range(1, CLIENTS)]

    def start(self, number: int) -> tuple[Any, Connection]:
        """Start a client, and wait until the client has read the journal."""
        mine, its = FORKS.Pipe()
        process = FORKS.Process(target=main, args=(self._folder, number, its))
        process.start()
        its.close()
        mine.recv()
        return process, mine

    def order(self, numbers: Sequence[int], order: str, seconds: float) -> None:
        """Make the clients `numbers` begin to carry out an order."""
        for number in numbers:
            self.all[number][1].send((order, seconds))

    def results(self, numbers: Sequence[int]) -> list[Any]:
        """Wait for the clients `numbers`, and return the clients' results."""
        return [self.all[number][1].recv() for number in numbers]

    def replace(self, number: int) -> None:
        """Start a client in place of a killed client."""
        self.all[number][0].join()
        self.all[number] = self.start(number)

    def close(self) -> None:
        """End all clients and the holder."""
        for process, _ in self.all:
            process.kill()
            process.join()
        if holder := holder_of(self._folder):
            os.kill(holder, signal.SIGKILL)


@contextmanager
def clients() -> Iterator[Clients]:
    """Run eight clients on a new memory."""
    with tempfile.TemporaryDirectory() as folder:
        made = Clients(Path(folder) / "node")
        try:
            yield made
        finally:
            made.close()


def run() -> list[Figure]:
    """Return the figures of eight clients, which keep all cores busy."""
    with clients() as made:
        return [*_lookups(made), *_deaths(made), *_holders(made)]


def _pooled(results: Sequence[Times]) -> Times:
    pooled = new_times()
    for times in results:
        for key, values in times.items():
            pooled[key] += values
    return pooled


def _lookups(made: Clients) -> list[Figure]:
    everybody = range(CLIENTS)
    made.order(everybody, "look", WARM_S)
    made.results(everybody)
    made.order(everybody, "look", LOOK_S)
    times = _pooled(made.results(everybody))
    return [
        beside(f"lookup of 128k tokens by {CLIENTS} clients at once", kind, quantile, limit, times)
        for kind, limit in (("hit", 50), ("miss", 5))
        for quantile in (50, 99)
    ]


def beside(name: str, kind: str, quantile: int, limit: float, times: Times) -> Figure:
    """Return how much longer a shared lookup takes than a private lookup, at a quantile."""
    mine, theirs = (float(np.percentile(times[pool, kind], quantile)) for pool in ("shared", "private"))
    both = f"{mine:.1f} us, private {theirs:.1f} us"
    return Figure(f"{name}, {kind}, p{quantile}", mine - theirs, limit, "us", both)


def _deaths(made: Clients) -> list[Figure]:
    """Kill a client that leases the whole prompt and writes slots. The other clients look prompts up meanwhile."""
    others, victim = range(CLIENTS - 1), CLIENTS - 1
    p99: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * DEATHS):
        dies = number % 2 == 1
        made.order([victim], "hold", 0)
        made.results([victim])
        made.order(others, "look", WINDOW_S)
        if dies:
            time.sleep(WINDOW_S / 4)
            made.all[victim][0].kill()
        p99[dies].append(float(np.percentile(_pooled(made.results(others))["shared", "hit"], 99)))
        if not dies:
            made.all[victim][0].kill()
        made.replace(victim)
    quiet, after = (median(p99[dies]) for dies in (False, True))
    spread = float(np.subtract(*np.percentile(p99[False], [75, 25])))
    both = f"{after:.0f} us, {quiet:.0f} us without; the limit is the spread of {DEATHS} windows without a death"
    return [Figure("p99 of lookups of 7 clients when the 8th is killed, more", after - quiet, spread, "us", both)]


def _holders(made: Clients) -> list[Figure]:
    """Kill the holder, so that all clients search for another holder at the same time."""
    took = []
    for number in range(HOLDERS):
        first = number % CLIENTS
        rest = [one for one in range(CLIENTS) if one != first]
        made.order(rest, "serve", 2.5)
        made.order([first], "outlive", 2.5)
        took += made.results([first])
        made.results(rest)
    both = f"median {median(took):.2f} s of {HOLDERS} deaths, {CLIENTS} clients"
    return [Figure("death of the holder until the next save is published, longest", max(took), 2, "s", both)]
