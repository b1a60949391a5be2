"""An engine's stock sends batches in order. The time to make a batch does not depend on the number of waiting items."""

from __future__ import annotations

import tracemalloc

import pytest

from kvpipe.node.messages import BatchAnswer, Use
from kvpipe.node.replica import stamp_of
from kvpipe.node.stock import Stock

MANY = 100_000


def stock_of(*slots: int) -> Stock:
    """Return a stock from which saves have taken `slots`, at generation 2."""
    made = Stock(0)
    made.answered(BatchAnswer(0, tuple((slot, 2) for slot in slots)))
    for _ in slots:
        made.take()
    return made


def test_eviction_is_sent_with_the_report_of_its_chunk_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """More reports wait than fit into one batch. The holder ignores the eviction of a chunk that is not published."""
    monkeypatch.setattr("kvpipe.node.stock.BATCH_MAX", 2)
    stock = stock_of(0, 1, 2)
    for slot in range(3):
        assert stock.landed(slot, 0, b"key", 4)
    stock.evictions |= {2: 3, 7: 9}
    first = stock.batch(0)
    assert first is not None
    assert ([one.slot for one in first.published], first.evicted) == ([0, 1], ((7, 9),))
    stock.answered(BatchAnswer(0))
    second = stock.batch(0)
    assert second is not None
    assert ([one.slot for one in second.published], second.evicted) == ([2], ((2, 3),))
    stock.answered(BatchAnswer(0))
    assert (stock.reports, stock.evictions) == ({}, {})


@pytest.mark.parametrize("waiting", ["reports", "evictions", "uses"])
def test_batch_copies_only_what_it_sends(waiting: str) -> None:
    """An operator may evict all chunks at once. Then several steps send the evictions."""
    stock = stock_of(*(range(MANY) if waiting == "reports" else ()))
    if waiting == "reports":
        for slot in range(MANY):
            stock.landed(slot, 0, b"key", 4)
    elif waiting == "uses":
        for slot in range(MANY):
            stock.uses.add(Use("touched", stamp_of(slot, 2)))
    else:
        getattr(stock, waiting).update(dict.fromkeys(range(MANY), 2))
    tracemalloc.start()
    try:
        stock.batch(0)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 << 10
