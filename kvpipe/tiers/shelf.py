"""A tier in use by one process: opened in the background, left alone while it fails, used again when it is back."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio

from kvpipe.statemachine import breaker as m
from kvpipe.statemachine.core import Compiled, Cursor, Edge, State
from kvpipe.tiers.base import Tier, TierError, TierFullError
from kvpipe.tiers.envelope import Sealer
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace import events as e
from kvpipe.trace.recorder import OFF, Recorder

BREAKER: Final[Compiled] = m.BREAKER.compile()
FAULTS_MAX: Final = 3
"""Failures in a row that open a breaker; one that took too long does so alone."""
PROBE_S, PROBE_S_MAX, JITTER = 0.5, 30.0, 0.2
"""First and longest time between probes, which doubles; by which share it varies, for engines not to ask at once."""

OPEN_S_MAX: Final = 30.0
"""For opening, probing and closing a tier: an index has to be rebuilt, a client process started."""

FIND, READ, WRITE = "find", "read", "write"
USES: Final = (FIND, READ, WRITE)


MadeTier = tuple[str, TierSpec, Tier]
"""A tier's name, how it was configured, and itself."""


class Breaker(Cursor):
    """Whether one process uses one tier for one purpose. On the loop thread."""

    __slots__ = ("_trace", "faults", "number", "tier", "use")

    def __init__(self, tier: str, use: str, number: int, trace: Recorder) -> None:
        """Closed. `number` is what the trace calls it."""
        super().__init__(BREAKER, number, self._took if trace.detail else None)
        self.tier, self.use, self.number, self._trace = tier, use, number, trace
        self.faults = 0

    @property
    def allows(self) -> bool:
        """Whether the tier is to be tried."""
        return self.state.row != m.OPEN

    def ok(self) -> None:
        """A call has ended well."""
        self.faults = 0
        if self.state.row != m.CLOSED and self.fire(m.OK).moves:
            self._trace.put(e.TierBack(*self._trace.of("", 0), tier=self.tier, use=self.use))

    def fault(self, why: str, *, slow: bool = False) -> None:
        """A call has failed. `slow`: by taking too long."""
        self.faults += 1
        last = slow or self.faults >= FAULTS_MAX
        if self.fire(m.FAULT_LAST if last else m.FAULT, why).moves:
            self._trace.put(e.TierLeft(*self._trace.of("", 0), tier=self.tier, use=self.use, why=why))

    def _took(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        self._trace.took("", 0, self._trace.step, cursor, self.number, was, edge, why)


class Shelf:
    """One tier, and what one process knows of it."""

    def __init__(
        self, name: str, spec: TierSpec, tier: Tier, uses: tuple[str, ...], *, place: int = 0, trace: Recorder = OFF
    ) -> None:
        """`uses`: what this process does with it. `place`: in the order of tiers.

        Raises:
            ConfigError: its encryption key cannot be read.

        """
        self.name, self.spec, self.tier = name, spec, tier
        self.sealer = Sealer(secrets_of(spec))
        self.breakers = {use: Breaker(name, use, place * len(USES) + USES.index(use), trace) for use in uses}
        self.timeout_s, self.probe_s = spec.timeout_ms_max / 1000, PROBE_S
        self._opened = anyio.Event()
        self._bell = anyio.Event()
        self._hurry = anyio.Event()

    def hurry(self) -> None:
        """Probe now. On the loop thread."""
        self._hurry.set()

    async def ready(self) -> None:
        """Wait until it was opened."""
        await self._opened.wait()

    def fault(self, use: str, why: str, *, slow: bool = False) -> None:
        """A call for `use` has failed."""
        self.breakers[use].fault(why, slow=slow)
        self._bell.set()

    async def keep(self) -> None:
        """Open the tier, and probe it while a breaker is open. Runs until cancelled, and closes it then."""
        try:
            await self._open()
            while True:
                await self._probe()  # at first too: opening it may have taken several attempts
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
        """Ask until every breaker that is open has been answered, and a call has closed it."""
        wait_s = self.probe_s
        while any(breaker.state.row != m.CLOSED for breaker in self.breakers.values()):
            with anyio.move_on_after(_varied(wait_s)):
                await self._hurry.wait()
            self._hurry = anyio.Event()
            wait_s = min(wait_s * 2, PROBE_S_MAX)
            shut = [breaker for breaker in self.breakers.values() if not breaker.allows]
            if shut:
                why, full = await self._try(self.tier.health)
                for breaker in shut:
                    failed = why and (breaker.use == WRITE or not full)
                    breaker.fire(m.PROBE_FAILED if failed else m.PROBE_OK, why)

    async def _try(self, call: Callable[[], Awaitable[None]]) -> tuple[str, bool]:
        """Return why `call` failed, or nothing; and whether the tier can be read all the same."""
        try:
            with anyio.fail_after(max(self.timeout_s * 4, OPEN_S_MAX)):
                await call()
        except TierError as error:
            return str(error), isinstance(error, TierFullError)
        except TimeoutError:
            return "no answer in time", False
        except Exception as error:  # noqa: BLE001  (a bug of a tier's, or no thread could be started: others go on)
            return repr(error), False
        return "", False


def shelves(tiers: Sequence[MadeTier], uses: tuple[str, ...], trace: Recorder = OFF) -> list[Shelf]:
    """Return a shelf for each tier, in order. Raises `ConfigError`, see `Shelf`."""
    return [Shelf(name, spec, tier, uses, place=at, trace=trace) for at, (name, spec, tier) in enumerate(tiers)]


def _varied(seconds: float) -> float:
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311  (nobody must guess it)
