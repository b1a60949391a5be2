"""A ticket is completed once. The ticket's sink runs before waiters wake up. A withdrawn copy never begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import pytest

from kvpipe.statemachine import ticket as m
from kvpipe.transfer import base
from kvpipe.transfer.base import BEGUN, DONE, NO_JOBS, QUEUED, QUIET, WITHDRAWN, Ticket, TicketState

CALLS: dict[str, Callable[[Ticket], object]] = {
    m.BEGIN: Ticket.begin,
    m.WITHDRAW: Ticket.withdraw,
    m.COMPLETE: Ticket.complete,
}


def _ticket() -> Ticket:
    return Ticket(None, 0, 0, lambda _: None)


def test_a_waiter_wakes_after_the_news_is_in_the_inbox() -> None:
    """A ticket's sink has returned before any thread that waits for the ticket continues."""
    seen: list[tuple[bool, bool]] = []
    ticket = Ticket(None, 0, 0, lambda t: seen.append((t.over, t.done)))
    assert not ticket.wait(0.0)
    ticket.complete(frozenset({4}))
    assert seen == [(True, False)]
    assert ticket.done
    assert ticket.wait(0.0)
    assert ticket.failed == {4}


def test_a_ticket_completes_once() -> None:
    """A second completion is a bug of the engine.

    The second call raises an error, does not call the sink, and does not change the outcome.
    """
    seen: list[Ticket] = []
    ticket = Ticket(None, 0, 0, seen.append)
    ticket.complete()
    with pytest.raises(RuntimeError, match="completed only once"):
        ticket.complete(frozenset({1}))
    assert seen == [ticket]
    assert ticket.failed == NO_JOBS


def test_withdrawn_copy_does_not_begin() -> None:
    """A withdrawn copy does not begin, but its ticket is still completed."""
    ticket = _ticket()
    assert ticket.withdraw()
    assert not ticket.begin()
    assert not ticket.over
    ticket.complete(frozenset({1}))
    assert ticket.done


def test_begun_copy_cannot_be_withdrawn() -> None:
    """A copy that has begun may write to memory until the copy ends."""
    ticket = _ticket()
    assert ticket.begin()
    assert not ticket.withdraw()
    ticket.complete()
    assert ticket.withdraw()
    assert not ticket.begin()


@pytest.mark.parametrize("event", CALLS)
@pytest.mark.parametrize("state", m.TICKET.states)
def test_every_cell_is_as_in_the_table(state: str, event: str) -> None:
    """In each state, each call of a ticket has the effect in the ticket's table. An illegal call changes nothing.

    Only a completion calls the sink.
    """
    notified: list[TicketState] = []
    ticket = Ticket(None, 0, 0, lambda t: notified.append(t.state))
    ticket.state = TicketState[state]
    edge = m.TICKET.compile().states[state].on[event]
    if edge.rejects:
        with pytest.raises(RuntimeError, match=f"event {event} is illegal in state {state}: {edge.why}"):
            CALLS[event](ticket)
        assert (ticket.state.name, ticket.failed, notified) == (state, NO_JOBS, [])
        return
    answer = CALLS[event](ticket)
    if event == m.COMPLETE:
        assert notified == [TicketState[edge.to.name]]
        assert ticket.state is TicketState[edge.to.on[m.NOTIFY].to.name]
    else:
        assert ticket.state is TicketState[edge.to.name]
        assert answer == (edge.moves if event == m.BEGIN else ticket.state in QUIET)


def test_only_a_copy_that_is_over_notifies() -> None:
    """Only `complete` calls the sink, after it has moved the ticket."""
    assert [name for name, row in m.TICKET.table.items() if row[m.NOTIFY].kind != "reject"] == [m.OVER]


class _Noted(Ticket):
    """A ticket that records whether the lock is held when it leaves `QUEUED`."""

    __slots__ = ()
    held: list[bool] = []

    def __setattr__(self, name: str, value: object) -> None:
        if name == "state" and value is not QUEUED and self.state is QUEUED:
            self.held.append(base._LEAVING.locked())
        super().__setattr__(name, value)


@pytest.mark.parametrize("event", CALLS)
def test_ticket_leaves_the_queue_only_under_the_lock(event: str) -> None:
    """Because of the lock, no thread begins or completes a ticket while another thread withdraws the ticket."""
    _Noted.held.clear()
    ticket = _Noted(None, 0, 0, lambda _: None)
    CALLS[event](ticket)
    assert ticket.state is not QUEUED
    assert _Noted.held == [True]


class _After:
    """A lock that runs `do` when it is taken, as if another thread had held the lock just before."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._lock, self._do = threading.RLock(), [do]

    def __enter__(self) -> None:
        self._lock.acquire()
        while self._do:
            self._do.pop()()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


@pytest.mark.parametrize(
    ("first", "then", "ends"),
    [
        (Ticket.withdraw, Ticket.begin, WITHDRAWN),
        (Ticket.withdraw, Ticket.complete, DONE),
        (Ticket.begin, Ticket.withdraw, BEGUN),
        (Ticket.begin, Ticket.complete, DONE),
        (Ticket.complete, Ticket.withdraw, DONE),
        (Ticket.complete, Ticket.begin, DONE),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_second_thread_does_not_undo_the_move_of_the_first(
    first: Callable[[Ticket], object],
    then: Callable[[Ticket], object],
    ends: TicketState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If two threads find a ticket in `QUEUED`, the second thread does not undo the first thread's move."""
    ticket = _ticket()
    monkeypatch.setattr(base, "_LEAVING", _After(lambda: first(ticket)))
    then(ticket)
    assert ticket.state is ends
