"""A guard for transfer engines of other packages. If an engine raises, its copies fail, and no wrong KV is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpipe.transfer.base import CopyPlan, Ticket, TransferEngine

if TYPE_CHECKING:
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.transfer.pages import PageView
    from kvpipe.transfer.pool import HostPool


class GuardedEngine:
    """A guard that copies with `engine` until `engine` raises. All later copies fail.

    After the exception, the host waits for the copies that were submitted earlier.
    """

    def __init__(self, engine: TransferEngine, name: str, fault: Callable[..., object]) -> None:
        """`fault("engine_failed", engine=name, call=..., why=...)` is called for each exception of `engine`."""
        self._engine, self._name, self._fault, self._lost = engine, name, fault, False
        self.piece_bytes = engine.piece_bytes

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Call `attach` of the guarded engine. Exceptions of `attach` are passed on, so that vLLM does not start."""
        self._engine.attach(views, geometry, pool)

    def claim(self, address: int, size: int) -> bool:
        """Call `claim` of the guarded engine."""
        return bool(self._ask("claim", lambda: self._engine.claim(address, size)))

    def prepare(self, plan: CopyPlan) -> None:
        """Call `prepare` of the guarded engine."""
        if not self._lost:
            self._ask("prepare", lambda: self._engine.prepare(plan))

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Call `submit` of the guarded engine. If the engine has raised, fail the ticket."""
        if not self._lost:
            self._ask("submit", lambda: self._engine.submit(plan, ticket))
        if self._lost and not ticket.over:
            ticket.complete(frozenset(job.id for job in plan.jobs))

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Call `guard_read` of the guarded engine. If the engine has raised, wait on the host for the ticket."""
        done = not self._lost and self._ask("guard_read", lambda: self._engine.guard_read(ticket, timeout_s))
        return ticket.wait(timeout_s) if self._lost else bool(done)

    def reached(self, ticket: Ticket) -> None:
        """Call `reached` of the guarded engine."""
        if not self._lost:
            self._ask("reached", lambda: self._engine.reached(ticket))

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Call `fence` of the guarded engine. If the engine has raised, wait on the host for the ticket."""
        done = not self._lost and self._ask("fence", lambda: self._engine.fence(ticket, timeout_s))
        return ticket.wait(timeout_s) if self._lost else bool(done)

    def abandon(self, ticket: Ticket) -> bool:
        """Call `abandon` of the guarded engine."""
        return bool(self._ask("abandon", lambda: self._engine.abandon(ticket))) or ticket.over

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None:
        """Call `scrub` of the guarded engine."""
        if not self._lost:
            self._ask("scrub", lambda: self._engine.scrub(plan, jobs))

    def shutdown(self) -> None:
        """Call `shutdown` of the guarded engine."""
        self._ask("shutdown", self._engine.shutdown)

    def _ask(self, name: str, call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  (after a bug of the engine its copies fail, and vLLM serves)
            self._lost = True
            self._fault("engine_failed", engine=self._name, call=name, why=repr(error))
            return None
