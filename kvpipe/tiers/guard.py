"""One process's guard of a tier. The guard opens the tier in the background, and stops calls while the tier fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import anyio

from kvpipe.statemachine import breaker as m
from kvpipe.statemachine.core import Compiled, Cursor, Edge, State
from kvpipe.tiers.base import Capacity, Get, Key, Put, Read, Tier, TierError, TierFullError, Written
from kvpipe.tiers.envelope import Sealer
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.rate import ReadRate
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace import events as e
from kvpipe.trace.recorder import OFF, Recorder

FAULTS_MAX: Final = 3
"""The number of consecutive failures that opens a breaker. A single timeout opens the breaker, too."""
PROBE_S, PROBE_S_MAX, JITTER = 0.5, 30.0, 0.2
"""The delay before the first probe in seconds, the limit to which the delay doubles, and its random share."""

OPEN_S_MAX: Final = 30.0
"""The lowest time limit, in seconds, for opening, probing or closing a tier.

The tier may have to rebuild an index or to start a client process.
"""

FIND = "find"
"""The use of a tier for lookups by the scheduler's process. Each use has its own breaker."""
READ = "read"
"""The use of a tier for fetches by a rank."""
WRITE = "write"
"""The use of a tier for stores by a rank."""
USES: Final = (FIND, READ, WRITE)


_ResultT = TypeVar("_ResultT")

MadeTier = tuple[str, TierSpec, Tier]
"""(name, configuration, tier)."""


class Breaker(Cursor):
    """The circuit breaker for one use of one tier by one process. Called on the loop thread."""

    __slots__ = ("_trace", "faults", "number", "tier", "use")

    def __init__(self, machine: Compiled, tier: str, use: str, number: int, trace: Recorder) -> None:
        """Make a closed breaker. `number` identifies the breaker in the trace."""
        super().__init__(machine, number, self._took if trace.detail else None)
        self.tier, self.use, self.number, self._trace = tier, use, number, trace
        self.faults = 0

    @property
    def allows(self) -> bool:
        """Whether the tier may be called."""
        return self.state.row != m.OPEN

    def ok(self) -> None:
        """Record a call that has succeeded."""
        self.faults = 0
        if self.state.row != m.CLOSED and self.fire(m.OK).moves:
            self._trace.put(e.TierBack(*self._trace.of("", 0), tier=self.tier, use=self.use))

    def fault(self, why: str, *, slow: bool = False) -> None:
        """Record a call that has failed for the reason `why`. A call that timed out (`slow`) opens the breaker."""
        self.faults += 1
        last = slow or self.faults >= FAULTS_MAX
        if self.fire(m.FAULT_LAST if last else m.FAULT, why).moves:
            self._trace.put(e.TierLeft(*self._trace.of("", 0), tier=self.tier, use=self.use, why=why))

    def _took(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        self._trace.took("", 0, self._trace.step, cursor, self.number, was, edge, why)


class GuardedTier:
    """One tier in one process, with its breakers. The guard validates answers, because other packages define tiers."""

    def __init__(
        self, name: str, spec: TierSpec, tier: Tier, uses: tuple[str, ...], *, place: int = 0, trace: Recorder = OFF
    ) -> None:
        """`uses` are the members of `USES` that this process needs. `place` is the tier's index in the configuration.

        Raises:
            ConfigError: the tier's encryption key cannot be read.

        """
        self.name, self.spec, self.tier = name, spec, tier
        self.sealer, self.rate = Sealer(secrets_of(spec)), ReadRate()
        self.machine, first = m.BREAKER.compile(), place * len(USES)
        self.breakers = {use: Breaker(self.machine, name, use, first + USES.index(use), trace) for use in uses}
        self.timeout_s, self.probe_s = spec.timeout_ms_max / 1000, PROBE_S
        self._opened = anyio.Event()
        self._bell = anyio.Event()
        self._probe_now = anyio.Event()

    def probe_now(self) -> None:
        """Probe the tier now instead of at the next scheduled time. Called on the loop thread."""
        self._probe_now.set()

    async def ready(self) -> None:
        """Wait until the tier has been opened for the first time."""
        await self._opened.wait()

    def fault(self, use: str, why: str, *, slow: bool = False) -> None:
        """Record a failed call for `use`, as `Breaker.fault` describes, and wake the probing task."""
        self.breakers[use].fault(why, slow=slow)
        self._bell.set()

    # ---- calls to the tier, which raise only `TierError` ----------------------------------------------------------

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        return self._answer(await self._call(self.tier.exists, keys), bool, len(keys))

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`. The duration of the read is recorded in `rate`."""
        reads = list[Read]()
        self.rate.begin(time.monotonic())
        try:
            reads = self._answer(await self._call(self.tier.read, gets), Read, len(gets))
            return reads
        finally:
            hits = (get.size for get, read in zip(gets, reads, strict=False) if read is Read.HIT)
            self.rate.end(time.monotonic(), sum(hits))

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        return self._answer(await self._call(self.tier.write, puts), Written, len(puts))

    async def delete(self, keys: Sequence[Key]) -> None:
        """See `Tier.delete`."""
        await self._call(self.tier.delete, keys)

    async def _call(self, call: Callable[[Any], Awaitable[_ResultT]], asked: object) -> _ResultT:
        try:
            return await call(asked)
        except TierError:
            raise
        except BaseException as error:  # a bug in the tier is handled as a failed call
            if _ends_the_task(error):
                raise
            raise TierError(f"{self.name}: {error!r}") from error

    def _answer(self, answer: list[_ResultT], kind: type[_ResultT], count: int) -> list[_ResultT]:
        if isinstance(answer, list) and len(answer) == count and set(map(type, answer)) <= {kind}:
            return answer
        raise TierError(f"{self.name}: the tier's answer is not a list of {count} x {kind.__name__}")

    # ---- opening, probing and closing, on the loop thread ---------------------------------------------------------

    async def run(self) -> None:
        """Open the tier, and probe the tier while a breaker is open. A cancellation ends `run` and closes the tier."""
        try:
            await self._open()
            while True:
                await self._probe()  # nothing to record: each failed attempt to open the tier has opened the breakers
                await self._bell.wait()
                self._bell = anyio.Event()
        finally:
            with anyio.CancelScope(shield=True):
                await self._try(self.tier.close)

    async def _open(self) -> None:
        wait_s = self.probe_s
        while True:
            why, _ = await self._try(self.tier.open)
            if not why:
                self._opened.set()
                return
            for breaker in self.breakers.values():
                if breaker.allows:
                    breaker.fault(why, slow=True)
            await anyio.sleep(_varied(wait_s))
            wait_s = min(wait_s * 2, PROBE_S_MAX)

    async def _probe(self) -> None:
        """Probe the tier until every breaker is closed. A successful call after a successful probe closes a breaker."""
        wait_s = self.probe_s
        while any(breaker.state.row != m.CLOSED for breaker in self.breakers.values()):
            with anyio.move_on_after(_varied(wait_s)):
                await self._probe_now.wait()
            self._probe_now = anyio.Event()
            wait_s = min(wait_s * 2, PROBE_S_MAX)
            shut = [breaker for breaker in self.breakers.values() if not breaker.allows]
            if shut:
                why, full = await self._try(self.tier.health)
                for breaker in shut:
                    failed = why and (breaker.use == WRITE or not full)
                    breaker.fire(m.PROBE_FAILED if failed else m.PROBE_OK, why)

    async def _try(self, call: Callable[[], Awaitable[None]]) -> tuple[str, bool]:
        """Return (why `call` has failed, or ""; whether the tier can still be read)."""
        try:
            with anyio.fail_after(max(self.timeout_s * 4, OPEN_S_MAX)):
                await call()
        except TierError as error:
            return str(error), isinstance(error, TierFullError)
        except TimeoutError:
            return "no answer in time", False
        except BaseException as error:  # other tiers must go on after a bug in this tier, or if no thread can start
            if _ends_the_task(error):
                raise
            return repr(error), False
        return "", False


def _ends_the_task(error: BaseException) -> bool:
    """Whether this task is being cancelled. A tier may also raise `CancelledError` without a cancellation."""
    task = asyncio.current_task()
    cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    return cancelled or isinstance(error, GeneratorExit)


def guarded(tiers: Sequence[MadeTier], uses: tuple[str, ...], trace: Recorder = OFF) -> list[GuardedTier]:
    """Return a guard for each tier, in the order of `tiers`. Raises the same `ConfigError` as `GuardedTier`."""
    return [GuardedTier(name, spec, tier, uses, place=at, trace=trace) for at, (name, spec, tier) in enumerate(tiers)]


async def capacity_of(tier: Tier) -> Capacity:
    """Return a tier's capacity. Raises `TierError` if the call fails, or if a number is negative or not an integer."""
    try:
        held = await tier.capacity()
        whole = [held.items, held.bytes_used, *([] if held.bytes_max is None else [held.bytes_max])]
        possible = all(isinstance(one, int) and one >= 0 for one in whole)
    except TierError:
        raise
    except Exception as error:  # a bug in the tier is handled as a failed call
        raise TierError(f"{tier.name}: {error!r}") from error
    if not possible:
        raise TierError(f"{tier.name}: the tier reports an impossible capacity, {held}")
    return held


def _varied(seconds: float) -> float:
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311  (the delay is no secret)
