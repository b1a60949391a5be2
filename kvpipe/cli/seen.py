"""What `kvpipe top` knows of engines: each is queried by itself, so that one that hangs delays no other."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
from pydantic import ValidationError

from kvpipe.errors import UsageError
from kvpipe.listening import ENGINE, Address
from kvpipe.manage.client import ask
from kvpipe.manage.models import EngineState, Holders

OVER_S: Final = 10.0
"""Seconds over which rates are averaged."""
ANSWER_S_MAX: Final = 5.0
"""Seconds for each operation on an engine's socket; then it is taken not to answer."""
COUNT_S_MIN: Final = 10.0
"""Seconds from one count of an engine's pool to the next."""
COUNT_SHARE_MAX: Final = 0.02
"""The largest share of the time in which an engine counts its pool for us."""
ENGINES_MAX: Final = 64
REQUESTS: Final = 50
USERS: Final = 20


class StateSample(NamedTuple):
    """An engine's state, received at `at_s` seconds of this process's monotonic clock."""

    at_s: float
    state: EngineState


class SeenEngine:
    """One engine: its latest answers, or `error`: why it does not answer.

    `holders`: who used its pool when that was last counted; None: it was not. `settled`: no query is under way.
    """

    def __init__(self, address: Address) -> None:
        """Start without an answer."""
        self.address, self.error = address, ""
        self.holders: Holders | None = None
        self.settled = anyio.Event()
        self.settled.set()
        self._samples: deque[StateSample] = deque()
        self._asked_at_s, self._count_at_s = 0.0, 0.0

    def begin(self, group: anyio.abc.TaskGroup, token: str) -> None:
        """Query the engine in a task of `group`, unless a query is under way."""
        if self.settled.is_set():
            self.settled = anyio.Event()
            group.start_soon(self.look, token)

    async def look(self, token: str) -> None:
        """Query the engine's state, and now and then who uses its pool. Never raises."""
        self._asked_at_s = time.monotonic()
        try:
            state = EngineState.model_validate(await self._ask(token, f"/v1/state?requests_max={REQUESTS}"))
            self._asked_at_s = 0.0
            self.took(state, time.monotonic())
            if time.monotonic() >= self._count_at_s:
                await self._count(token)
        except UsageError as error:
            self._lose(str(error).removeprefix("kvpipe: "))
        except ValidationError:
            self._lose("another version of kvpipe: use the one that the engine runs")
        finally:
            self._asked_at_s = 0.0
            self.settled.set()

    async def _count(self, token: str) -> None:
        """Query who uses the pool. The engine looks at every slot for that: it is asked the less often, the more."""
        began_s = time.monotonic()
        try:
            self.holders = Holders.model_validate(await self._ask(token, f"/v1/holders?rows_max={USERS}"))
        except UsageError:  # there may be too many slots to be counted in time; the state is known all the same
            self.holders = None
        now_s = time.monotonic()
        self._count_at_s = now_s + max(COUNT_S_MIN, (now_s - began_s) / COUNT_SHARE_MAX)

    async def _ask(self, token: str, path: str) -> Any:  # noqa: ANN401  (JSON)
        asked = functools.partial(ask, self.address, token, "GET", path, answer_s_max=ANSWER_S_MAX)
        own = anyio.CapacityLimiter(1)  # of those that all share, engines that hang would leave none to others
        return await anyio.to_thread.run_sync(asked, abandon_on_cancel=True, limiter=own)

    def _lose(self, why: str) -> None:
        self._samples.clear()
        self.holders, self._count_at_s = None, 0.0
        self.error = why

    def took(self, state: EngineState, now_s: float) -> None:
        """Store an answer, received at `now_s`. Earlier ones are dropped if another engine has answered."""
        self.error = ""
        last = self.last
        if last is not None and (state.engine != last.engine or state.step < last.step or state.up_s < last.up_s):
            self._samples.clear()  # another engine has taken its place
            self.holders, self._count_at_s = None, 0.0
        self._samples.append(StateSample(now_s, state))
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - OVER_S:  # noqa: PLR2004  (a first and a last)
            self._samples.popleft()

    @property
    def late_s(self) -> float:
        """For how many seconds its state has been waited for; 0: it is not."""
        return time.monotonic() - self._asked_at_s if self._asked_at_s else 0.0

    @property
    def last(self) -> EngineState | None:
        """The last answer; None if the engine does not answer."""
        return self._samples[-1].state if self._samples else None

    @property
    def since(self) -> tuple[EngineState, float] | None:
        """(the answer `OVER_S` before the last one, or the first; the seconds between the two); None: there is one."""
        first, last = self._samples[0], self._samples[-1]
        return (first.state, last.at_s - first.at_s) if last.at_s > first.at_s else None


class EngineList:
    """The engines at some addresses."""

    def __init__(self, addresses: Sequence[Address], token: str) -> None:
        """No engine is queried yet."""
        self._addresses, self._token = addresses, token
        self._engines: dict[Address, SeenEngine] = {}

    @property
    def engines(self) -> list[SeenEngine]:
        """Those found by the last `look`."""
        return list(self._engines.values())

    async def look(self, group: anyio.abc.TaskGroup, wait_s_max: float) -> None:
        """Query all engines that are not being queried, in tasks of `group`; wait for all, for `wait_s_max` seconds."""
        there = list(dict.fromkeys(one for address in self._addresses for one in _found(address)))[:ENGINES_MAX]
        self._engines = {one: self._engines.get(one) or SeenEngine(one) for one in there}
        for engine in self._engines.values():
            engine.begin(group, self._token)
        with anyio.move_on_after(wait_s_max):
            for engine in self._engines.values():
                await engine.settled.wait()


def _found(address: Address) -> Iterator[Address]:
    """Yield the address, or those of the sockets that it stands for."""
    if ENGINE not in address.path:
        yield address
        return
    pattern = "*".join(map(glob.escape, address.path.split(ENGINE)))
    for path in sorted(glob.glob(pattern)):  # noqa: PTH207  (a pattern from the root)
        with contextlib.suppress(OSError):  # it has gone
            if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116  (as globbed)
                yield address._replace(path=path)
