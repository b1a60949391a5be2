"""The state of engines for `kvpipe top`.

Each engine is queried in its own task, so that a hanging engine delays no other engine.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
from pydantic import ValidationError

from kvpipe.cli.seen_node import SeenNode
from kvpipe.errors import UsageError
from kvpipe.inputs.listening import Address, sockets
from kvpipe.manage.client import send_request
from kvpipe.manage.models import EngineState, Holders

OVER_S: Final = 10.0
"""Rates are averages over this number of seconds."""
ANSWER_S_MAX: Final = 5.0
"""Timeout in seconds of each operation on an engine's socket. After a timeout, the engine is shown as not answering."""
COUNT_S_MIN: Final = 10.0
"""The shortest time between two counts of an engine's pool, in seconds."""
COUNT_SHARE_MAX: Final = 0.02
"""The largest share of an engine's time that this command uses for counts of the engine's pool."""
ENGINES_MAX: Final = 64
REQUESTS: Final = 50
USERS: Final = 20


class StateSample(NamedTuple):
    """An engine's state. `at_s` is the time of its receipt, in seconds of this process's monotonic clock."""

    at_s: float
    state: EngineState


class SeenEngine:
    """The latest answers of one engine. `error` is the reason why the engine does not answer, or "" if it answers.

    `holders` are the users of the pool at its last count, or None if the pool was not counted. `settled` is an event
    that is set while no query is in progress.
    """

    def __init__(self, address: Address) -> None:
        """Make the entry of an engine that was not queried yet."""
        self.address, self.error = address, ""
        self.holders: Holders | None = None
        self.settled = anyio.Event()
        self.settled.set()
        self._samples: deque[StateSample] = deque()
        self._asked_at_s, self._count_at_s = 0.0, 0.0

    def query(self, group: anyio.abc.TaskGroup, token: str) -> None:
        """Query the engine in a task of `group`, unless a query is in progress."""
        if self.settled.is_set():
            self.settled = anyio.Event()
            group.start_soon(self.look, token)

    async def look(self, token: str) -> None:
        """Query the engine's state, and the users of its pool if their next count is due. Never raises."""
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
        """Query the users of the pool, and set the time of the next count.

        A count reads every slot of the engine. The longer a count takes, the longer is the pause before the next count.
        """
        began_s = time.monotonic()
        try:
            self.holders = Holders.model_validate(await self._ask(token, f"/v1/holders?rows_max={USERS}"))
        except UsageError:  # a large pool may take too long to count; the state is shown without its users
            self.holders = None
        now_s = time.monotonic()
        self._count_at_s = now_s + max(COUNT_S_MIN, (now_s - began_s) / COUNT_SHARE_MAX)

    async def _ask(self, token: str, path: str) -> Any:  # noqa: ANN401  (JSON)
        asked = functools.partial(send_request, self.address, token, "GET", path, answer_s_max=ANSWER_S_MAX)
        # a limiter of its own, because hanging engines would take all threads of a shared limiter
        own = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(asked, abandon_on_cancel=True, limiter=own)

    def _lose(self, why: str) -> None:
        self._samples.clear()
        self.holders = None
        self.error = why

    def took(self, state: EngineState, now_s: float) -> None:
        """Store an answer, received at `now_s`. If another engine has answered, earlier answers are dropped."""
        self.error = ""
        last = self.last
        if last is not None and (state.engine != last.engine or state.step < last.step or state.up_s < last.up_s):
            self._samples.clear()  # earlier samples are of another engine that has listened at this address
            self.holders, self._count_at_s = None, 0.0
        self._samples.append(StateSample(now_s, state))
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - OVER_S:  # noqa: PLR2004  (a first and a last)
            self._samples.popleft()

    @property
    def late_s(self) -> float:
        """The time in seconds since the state was requested, or 0 if no such request is in progress."""
        return time.monotonic() - self._asked_at_s if self._asked_at_s else 0.0

    @property
    def last(self) -> EngineState | None:
        """The last answer. None if the engine does not answer."""
        return self._samples[-1].state if self._samples else None

    @property
    def since(self) -> tuple[EngineState, float] | None:
        """An earlier answer, and the seconds from the earlier to the last answer. None if there is only one answer.

        The earlier answer is from `OVER_S` seconds before the last answer, or is the first answer.
        """
        first, last = self._samples[0], self._samples[-1]
        return (first.state, last.at_s - first.at_s) if last.at_s > first.at_s else None


class EngineList:
    """The engines at some addresses, and the memory of their `node`, if it is watched."""

    def __init__(self, addresses: Sequence[Address], token: str, node: SeenNode | None = None) -> None:
        """Make a list without engines. `look` finds and queries engines."""
        self._addresses, self._token, self.node = addresses, token, node
        self._engines: dict[Address, SeenEngine] = {}

    @property
    def engines(self) -> list[SeenEngine]:
        """The engines that the last `look` found."""
        return list(self._engines.values())

    async def look(self, group: anyio.abc.TaskGroup, wait_s_max: float) -> None:
        """Query all engines that are not being queried, in tasks of `group`. Wait at most `wait_s_max` seconds."""
        there = list(dict.fromkeys(one for address in self._addresses for one in sockets(address)))[:ENGINES_MAX]
        self._engines = {one: self._engines.get(one) or SeenEngine(one) for one in there}
        for engine in self._engines.values():
            engine.query(group, self._token)
        queried: list[SeenEngine | SeenNode] = [*self._engines.values()]
        if self.node is not None:
            self.node.query(group)
            queried.append(self.node)
        with anyio.move_on_after(wait_s_max):
            for one in queried:
                await one.settled.wait()
