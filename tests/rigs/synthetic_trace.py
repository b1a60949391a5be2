"""Synthetic traces in kvpipe's format, of any number of requests, ranks and layers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvpipe.statemachine import copy, request
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.events import SCHEDULER, Event

ORIGIN_NS = 7_000_000_000_000
WALL_NS = 1_790_000_000_000_000_000
US, MS = 1_000, 1_000_000
HOSTILE = (
    "</script><img src=x onerror='window.pwned=1'>",
    "<!--<script>window.pwned=2</script>",
    "'\"><svg onload=window.pwned=3>",
    "\u2028]}</textarea>{{7*7}}",
)
"""Names of requests that would run code in a page that does not escape them."""


def moment(
    ms: float, kind: type[Event], /, rank: int = SCHEDULER, *, epoch: int = 1, step: int = 0, **fields: Any
) -> Event:
    """Return the common fields of an event that occurs `at_ms` milliseconds after the beginning."""
    name, engine = str(fields.pop("request", "r")), str(fields.pop("engine", "e"))
    return kind(int(ms * MS), rank, name, epoch, step, int(ms * MS) + WALL_NS, engine, **fields)  # type: ignore[arg-type]


class _SyntheticRequest:
    """One request of a `Play`."""

    def __init__(self, name: str, added_ns: int, steps: int, load: str) -> None:
        self.name, self.added_ns, self.steps, self.load = name, added_ns, steps, load
        self.epoch = self.preemptions = 0
        self.loaded_ns = 0
        self.was = request.NEW


class _SyntheticJob(NamedTuple):
    """A save or load of one request."""

    id: int
    kind: str
    owner: _SyntheticRequest


class Play:
    """Plays `requests` on one engine: arrivals, loads, saves, preemptions and rare failures."""

    def __init__(
        self, requests: int, ranks: int = 2, layers: int = 4, *, engine: str = "e1", seed: int = 0, running_max: int = 8
    ) -> None:
        """Prepare the play. Equal arguments give equal events."""
        self.rng = random.Random(seed)
        self.engine, self.ranks, self.layers, self.running_max = engine, ranks, layers, running_max
        self.events: list[Event] = []
        self.now, self.step, self.jobs = ORIGIN_NS, 0, 0
        self.waiting: deque[_SyntheticRequest] = deque()
        self.loading: list[_SyntheticRequest] = []
        self.running: list[_SyntheticRequest] = []
        arrival = ORIGIN_NS
        self.coming: deque[_SyntheticRequest] = deque()
        for i in range(requests):
            arrival += int(self.rng.expovariate(1) * 14 * MS)
            kind = self.rng.choice(["", "load_sync", "load_async"])
            self.coming.append(_SyntheticRequest(f"chatcmpl-{engine}-{i:05d}", arrival, self.rng.randint(4, 24), kind))

    def all(self) -> list[Event]:
        """Play until the last request is done."""
        for rank in range(SCHEDULER, self.ranks):
            side = "scheduler" if rank == SCHEDULER else "worker"
            self._put(e.Started, rank=rank, kvpipe="0.1.0", side=side, layers=self.layers)
        while self.coming or self.waiting or self.loading or self.running:
            self._play_step()
        for rank in range(SCHEDULER, self.ranks):
            self._put(e.Ended, rank=rank)
        return self.events

    def _put(
        self,
        kind: type[Event],
        /,
        of: _SyntheticRequest | None = None,
        rank: int = SCHEDULER,
        t: int = 0,
        **fields: object,
    ) -> None:
        t = t or self.now
        name, epoch = (of.name, of.epoch) if of else ("", 0)
        wall = t + WALL_NS - ORIGIN_NS
        self.events.append(kind(t, rank, name, epoch, self.step, wall, self.engine, **fields))  # type: ignore[arg-type]

    def _move(self, one: _SyntheticRequest, on: str, now: str) -> None:
        kind = transitions.event_of_move("request", one.was, now)
        self._put(kind, one, machine="request", cursor=int(one.name[-5:]), on=on, was=one.was, now=now)
        one.was = now

    def _play_step(self) -> None:
        if not (self.waiting or self.loading or self.running):
            self.now = max(self.now, self.coming[0].added_ns)
        self.now += 300 * US
        while self.coming and self.coming[0].added_ns <= self.now:
            one = self.coming.popleft()
            self._put(e.RequestAdded, one, t=one.added_ns, prompt_tokens=1024)
            self.waiting.append(one)
        for one in [one for one in self.loading if one.loaded_ns <= self.now]:
            self.loading.remove(one)
            self._put(e.LeasesReturned, one, chunks=2)
            self._move(one, request.LOADED, request.RUNNING)
            self.running.append(one)
        jobs: list[_SyntheticJob] = []
        while self.waiting and len(self.running) + len(self.loading) < self.running_max:
            jobs += self._admit(self.waiting.popleft())
        if len(self.running) > self.running_max // 2 and self.rng.random() < 0.04:
            one = self.running.pop()
            one.preemptions += 1
            self._move(one, request.PREEMPT, request.PREEMPTED)
            self.waiting.appendleft(one)
        self.step += 1
        for one in self.running:
            if self.rng.random() < 0.3:
                self.jobs += 1
                jobs.append(_SyntheticJob(self.jobs, "save", one))
                self._put(e.SavePlanned, one, job=self.jobs, pages=4)
        self._forward(jobs)
        for one in list(self.running):
            one.steps -= 1
            if one.steps <= 0:
                self.running.remove(one)
                self._move(one, request.FINISH, request.FINISHED)
                self._put(
                    e.RequestDone, one, status="finished_stopped", prompt_tokens=1024, output_tokens=64,
                    preemptions=one.preemptions, lived_ms=(self.now - one.added_ns) / MS,
                )  # fmt: skip

    def _admit(self, one: _SyntheticRequest) -> Iterator[_SyntheticJob]:
        one.epoch += 1
        kind = e.RequestReadmitted if one.epoch > 1 else e.RequestAdmitted
        hit = {"memory": 768} if one.load else {}
        self._put(
            kind, one, prompt_tokens=1024, hit_tokens=hit, missed_tokens=256 if one.load else 1024,
            why="being_saved" if one.load else "not_saved", load=one.load, waited_ms=(self.now - one.added_ns) / MS,
        )  # fmt: skip
        if not one.load:
            self._move(one, request.ADMIT_EMPTY, request.RUNNING)
            self.running.append(one)
            return
        self._move(one, request.ADMIT_LOAD, request.ALLOCATED)
        self.jobs += 1
        self._put(e.LeasesTaken, one, chunks=2)
        self._put(e.LoadPlanned, one, job=self.jobs, kind=one.load, pages=24, tokens=768)
        self._move(one, request.DISPATCH, request.LOADING)
        (self.loading if one.load == "load_async" else self.running).append(one)
        if one.load == "load_sync":
            one.was = request.RUNNING
        yield _SyntheticJob(self.jobs, one.load, one)

    def _forward(self, jobs: list[_SyntheticJob]) -> None:
        """Run the step on every rank, and copy each layer of each kind of job."""
        took = self.rng.randint(3 * MS, 9 * MS)
        for rank in range(self.ranks):
            begin = self.now + self.rng.randint(0, 60 * US)
            self._put(e.StepRan, rank=rank, t=begin, took_ns=took, jobs=len(jobs), waited_ns=self.rng.randint(0, MS))
            for kind in ("load_sync", "load_async", "save"):
                some = [job for job in jobs if job.kind == kind]
                for layer in range(self.layers if some else 0):
                    self._copy(rank, kind, layer, some, begin, took)
        self.now += took + 100 * US

    def _copy(self, rank: int, kind: str, layer: int, jobs: list[_SyntheticJob], begin: int, took: int) -> None:
        at = begin + (took * (layer + 1) // (self.layers + 1) if kind == "save" else layer * 20 * US)
        lasts = self.rng.randint(200 * US, 2500 * US) * (3 if kind == "load_async" else 1)
        of = jobs[0].owner if len(jobs) == 1 else None
        failed = [jobs[0].id] if self.rng.random() < 0.002 else []
        ids = [job.id for job in jobs]
        self._put(e.LayerSubmitted, of, rank, at, kind=kind, layer=layer, jobs=ids)
        self._put(e.LayerCopied, of, rank, at, kind=kind, layer=layer, jobs=ids, took_ns=lasts, failed=failed)
        machine = copy.SAVE if kind == "save" else copy.LOAD
        for job in jobs:
            job.owner.loaded_ns = max(job.owner.loaded_ns, at + lasts)
            landed = copy.LANDED if layer == self.layers - 1 else f"LAYER_{layer}"
            now = copy.FAILED if job.id in failed else landed
            moved: type[Event] = transitions.Failed if job.id in failed else transitions.LayerLanded
            self._put(
                moved, job.owner, rank, at + lasts, machine=machine.name, cursor=job.id, on="landed_next", now=now
            )


def play(requests: int, ranks: int = 2, layers: int = 4, **how: object) -> list[Event]:
    """Return the events of `requests`; see `Play`."""
    return Play(requests, ranks, layers, **how).all()  # type: ignore[arg-type]
