"""The metrics of a node's memory, which an engine reads from shared memory and from its own records."""

from __future__ import annotations

import time

import pytest

from kvpipe.connectors.vllm.metrics import METRICS
from kvpipe.node import client
from kvpipe.scheduler.gauges import totals
from kvpipe.statemachine.node_link import HOLDER_LOST, WELCOME
from kvpipe.testing.direct_node import DirectPool
from tests.node.test_catalog import NodeWorld, Worlds
from tests.rigs.scheduler_world import SAVE


def _metrics(engine: NodeWorld) -> dict[str, float]:
    """Return the metrics of the node's memory without `node_`. A label follows its metric's name."""
    found = {name: labels for name, labels in totals(engine.side).items() if name.startswith("node_")}
    assert found.keys() == {name for name in METRICS if name.startswith("node_")}
    labelled = ((name.removeprefix("node_"), label, value) for name in found for label, value in found[name].items())
    return {f"{name} {label}".strip(): value for name, label, value in labelled}


def test_metrics_show_slots_by_state_and_of_this_engine(worlds: Worlds) -> None:
    """Every engine reads the same counts of slots.

    Each engine also reads its own stock, saves, pins and position in the journal.
    """
    first, second = worlds.start(stock=4), worlds.start()
    first.run(first.request("one", 8, shared=8))
    first.step()
    two = first.request("two", 8)
    first.requests = [two]
    first.admit(two)
    (job, *_) = [job for job in first.step(two) if job.kind == SAVE]
    found = _metrics(first)
    granted = sum(len(engine.granted) for engine in worlds.node.keeper.clients.values())
    slots = {"published": 2, "granted": granted, "free": 14 - granted}
    slots |= dict.fromkeys(("unready", "elsewhere", "evicting", "quarantine"), 0)
    assert {use: found[f"slots {use}"] for use in slots} == slots
    assert (found["writing"], found["stock"]) == (2, len(first.pool.stock.grants) - 2)
    assert (found["attached"], found["holder_silent_seconds"], found["takeovers"]) == (1, 0, 0)
    second.pool.mute = True
    lag = _metrics(second)["journal_lag"]
    first.end(job)
    first.step()
    first.step()
    assert _metrics(second)["journal_lag"] > lag
    second.pool.mute = False
    second.step()
    assert _metrics(second)["journal_lag"] == 0
    assert not _metrics(second)["pins"]
    assert second.ask(second.request("again", 8, shared=8, extra=1)) == 8 * 16
    assert _metrics(second)["pins"] == 2


def test_metrics_show_that_the_holder_is_silent_and_replaced(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the engine's last check that has seen the holder's clock move."""
    engine = worlds.start()
    assert isinstance(engine.pool, DirectPool)
    engine.pool._beats_missed = 3
    assert _metrics(engine)["holder_silent_seconds"] == pytest.approx(3 * client.LOOK_S)
    engine.pool.link.fire(HOLDER_LOST)
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: engine.pool._looked_s + 60)
        found = _metrics(engine)
    assert found["attached"] == 0
    assert found["holder_silent_seconds"] == pytest.approx(60 + 3 * client.LOOK_S)
    engine.pool.link.fire(WELCOME)
    engine.pool._beats_missed = 0
    worlds.node.take_over()
    engine.step()
    found = _metrics(engine)
    assert (found["attached"], found["holder_silent_seconds"], found["takeovers"]) == (1, 0, 1)
