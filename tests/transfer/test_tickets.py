"""A ticket is completed once, and whoever waited for it finds the news handed on."""

from __future__ import annotations

import pytest

from kvpipe.transfer.base import Ticket


def test_a_waiter_wakes_after_the_news_is_in_the_inbox() -> None:
    """When a ticket is completed, its news is handed on before any waiter can go on."""
    seen: list[bool] = []
    ticket = Ticket(None, 0, 0, lambda t: seen.append(t.done))
    assert not ticket.wait(0.0)
    ticket.complete(frozenset({4}))
    assert seen == [False]
    assert ticket.done
    assert ticket.wait(0.0)
    assert ticket.failed == {4}


def test_a_ticket_completes_once() -> None:
    """A second completion is the engine's bug and is not handed on."""
    seen: list[Ticket] = []
    ticket = Ticket(None, 0, 0, seen.append)
    ticket.complete()
    with pytest.raises(RuntimeError, match="twice"):
        ticket.complete()
    assert seen == [ticket]
