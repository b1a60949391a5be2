"""Tests of hints: each hint is read once and bounded, and is passed to the policy, or is ignored and counted."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.features.hints import ACTIONS_MAX, FIELDS_MAX, RESUME_S_MAX, TTL_S, TTL_S_MAX, read
from kvpipe.scheduler.wishes import RawAction, RawHints
from tests.rigs.scheduler_world import UNIT, CountingIndex, SchedulerWorld

CHUNK_UNITS = 4
NOW_S = 1000.0
RETAIN, DEMOTE, RESUME = Action.RETAIN, Action.DEMOTE, Action.RESUME


class HintedSide:
    """A scheduler side whose policy records its hints, and whose clock does not advance."""

    def __init__(self, *, takes_hints: bool = True) -> None:
        """Make an empty cache."""
        self.world = SchedulerWorld(chunk_units=CHUNK_UNITS)
        self.received: list[tuple[bytes, Hint]] = []
        catalog: Any = self.world.side.catalog
        catalog._clock = lambda: NOW_S
        if takes_hints:
            catalog._hint = self._receive

    def _receive(self, chunk: Chunk, hint: Hint) -> None:
        self.received.append((chunk.identity, hint))

    def arrive(self, name: str, units: int, own: object, actions: object = None) -> Any:
        """Return a request of `units` units, which arrives with hints."""
        request = self.world.request(name, units)
        self.world.side.on_new_request(request, RawHints(actions, own))
        self.world.admit(request)
        return request

    def counted(self, what: str) -> dict[str, int]:
        """Return how often hints were `what`: "ignored", by reason, or "applied", by action."""
        stats = self.world.side.stats()
        return {name.partition(".")[2]: n for name, n in stats.items() if name.startswith(f"hints_{what}.")}


@pytest.mark.parametrize(
    ("own", "action", "in_s"),
    [
        ({"retain": {}}, RETAIN, TTL_S),
        ({"retain": {"ttl_seconds": 7}}, RETAIN, 7.0),
        ({"retain": {"ttl_seconds": 1e12, "priority": 3}}, RETAIN, TTL_S_MAX),
        ({"retain": {"priority": 0}}, DEMOTE, 0.0),
        ({"demote": {}}, DEMOTE, 0.0),
        ({"evict": {"execute_at": "request_completion", "block_hashes": ["1"]}}, DEMOTE, 0.0),
        ({"deref": {}}, DEMOTE, 0.0),
        ({"resume": {"after_seconds": 20}}, RESUME, 20.0),
    ],
)
def test_parameter_and_envelope_have_the_same_meaning(own: object, action: Action, in_s: float) -> None:
    """A hint has the same effect in the parameter and in the envelope."""
    why: list[str] = []
    assert read(RawHints(None, own), why.append) == ((action, in_s),)
    assert isinstance(own, dict)
    enveloped = [RawAction(f"kv.{kind}", "1.3", payload) for kind, payload in own.items()]
    assert read(RawHints(enveloped, None), why.append) == ((action, in_s),)
    assert why == []


def _one(kind: object = "kv.retain", version: object = "1.0", payload: object = None) -> RawHints:
    return RawHints([RawAction(kind, version, {} if payload is None else payload)], None)


_BAD_PAYLOADS: list[object] = [
    [], "x", 3, {"ttl_seconds": 0}, {"ttl_seconds": -1}, {"ttl_seconds": float("nan")}, {"ttl_seconds": float("inf")},
    {"ttl_seconds": 10**400}, {"ttl_seconds": "60"}, {"ttl_seconds": True}, {"ttl_seconds": None},
    {"ttl_seconds": [0] * 1000}, {"priority": -1}, {"priority": True}, {"priority": 1.5}, {"session_id": "another"},
    {"execute_at": "now"}, {"include_current_request": False}, {1: 2}, {str(i): 0 for i in range(FIELDS_MAX + 1)},
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        *((_one(payload=payload), ["payload"]) for payload in _BAD_PAYLOADS),
        (_one("kv.resume", payload={}), ["payload"]),
        (_one("kv.resume", payload={"after_seconds": RESUME_S_MAX * 2}), ["payload"]),
        (_one("kv.demote", payload={"session_id": "s"}), ["payload"]),
        (_one("kv.fetch"), ["action"]),
        (_one("kv.retain\0"), ["action"]),
        (_one(None), ["action"]),
        (_one(["kv.retain"]), ["action"]),
        (_one(version="2.0"), ["version"]),
        (_one(version="10"), ["version"]),
        (_one(version=1), ["version"]),
        (_one(version=""), ["version"]),
        (RawHints("retain", None), ["malformed"]),
        (RawHints({"actions": []}, "retain"), ["malformed", "malformed"]),
        (RawHints([None, {}, "kv.retain"], None), ["malformed"] * 3),
        (RawHints([None] * (ACTIONS_MAX + 1), None), ["too_many"]),
        (RawHints([None], dict.fromkeys(map(str, range(ACTIONS_MAX)), 0)), ["too_many"]),
        (RawHints(None, {3: {}, "kv.retain": {}}), ["action", "action"]),
        (RawHints(None, {"retain": {}, "demote": {}, "resume": {"after_seconds": 1}}), ["contradiction"] * 3),
        (RawHints(None, {}), []),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_invalid_hint_is_ignored_and_counted(raw: RawHints, why: list[str]) -> None:
    """The hint is ignored with a reason. No exception is raised."""
    received: list[str] = []
    assert read(raw, received.append) == ()
    assert received == why


def test_first_hint_of_a_kind_is_used() -> None:
    """The envelope's hint replaces a hint of the same kind in the parameter. Hints of other kinds are applied, too."""
    received: list[str] = []
    actions = [RawAction("kv.retain", "1.0", {"ttl_seconds": 5}), RawAction("kv.fetch", "1.0", {})]
    own = {"retain": {"ttl_seconds": 6}, "resume": {"after_seconds": 4}}
    assert read(RawHints(actions, own), received.append) == ((RETAIN, 5.0), (RESUME, 4.0))
    assert received == ["action", "repeated"]


def test_malformed_action_is_counted_once_beside_actions_that_are_not() -> None:
    """A request has two actions, one of which is malformed. The other action is applied."""
    received: list[str] = []
    actions = [None, RawAction("kv.retain", "1.0", {"ttl_seconds": 5})]
    assert read(RawHints(actions, None), received.append) == ((RETAIN, 5.0),)
    assert received == ["malformed"]


def test_the_policy_takes_hints_when_chunks_land_and_when_the_request_is_over() -> None:
    """The policy gets a request's hints for each chunk that lands, with times counted from the request's arrival.

    When the request ends, the policy gets the hints again for all chunks, with times counted from the end.
    """
    hinted = HintedSide()
    request = hinted.arrive("a", 2 * CHUNK_UNITS + 1, {"retain": {"ttl_seconds": 60}, "resume": {"after_seconds": 20}})
    catalog: Any = hinted.world.side.catalog
    catalog._clock = lambda: NOW_S + 7
    hinted.world.succeed(*hinted.world.step(request))
    soon = Hint(RETAIN, NOW_S + 60), Hint(RESUME, NOW_S + 20)
    landed = [request.block_hashes[units - 1] for units in (CHUNK_UNITS, 2 * CHUNK_UNITS)]
    assert hinted.received[:4] == [(chunk, hint) for chunk in landed for hint in soon]
    hinted.received.clear()
    hinted.world.side.finished(request)
    chunks = [request.block_hashes[units - 1] for units in (2 * CHUNK_UNITS + 1, 2 * CHUNK_UNITS, CHUNK_UNITS)]
    hints = Hint(RETAIN, NOW_S + 67), Hint(RESUME, NOW_S + 27)
    assert hinted.received == [(chunk, hint) for hint in hints for chunk in chunks]
    assert hinted.counted("applied") == {"retain": 1, "resume": 1}


def test_late_chunk_is_reported_to_the_policy() -> None:
    """The last save lands after the request's end. The hint of its chunks counts from the end of the request."""
    hinted = HintedSide()
    request = hinted.arrive("a", 2 * CHUNK_UNITS, {"resume": {"after_seconds": 20}})
    jobs = hinted.world.step(request)
    hinted.world.side.finished(request)
    hinted.received.clear()  # leave out the calls for the last chunk, which is still being written
    catalog: Any = hinted.world.side.catalog
    catalog._clock = lambda: NOW_S + 7
    ended: list[bool] = []
    catalog._request = lambda _, *, over: ended.append(over)
    hinted.world.succeed(*jobs)
    assert ended[0], "it has ended"
    assert Counter(hinted.received) == Counter(
        (request.block_hashes[units - 1], Hint(RESUME, NOW_S + 20)) for units in (CHUNK_UNITS, 2 * CHUNK_UNITS)
    )


@pytest.mark.parametrize("adapter", [False, True])
def test_all_chunks_of_a_request_with_an_adapter_are_reported(*, adapter: bool) -> None:
    """The report does not use the adapter's keys, which are not known any more after the request has ended."""
    hinted = HintedSide()
    world: Any = hinted.world
    world.check = lambda: None  # the check does not know adapters
    request = hinted.world.request("a", 2 * CHUNK_UNITS)
    if adapter:
        request.lora_request = SimpleNamespace(
            lora_int_id=1, lora_name="x", lora_path="/x", load_inplace=False, is_3d_lora_weight=False
        )
    adapters = hinted.world.side.adapters
    hinted.world.side.on_new_request(request, RawHints(None, {"demote": {}}))
    if adapter:
        use = adapters._uses[request.request_id]
        use.digest, use.named_s = b"D", math.inf
    hinted.world.admit(request)
    hinted.world.succeed(*hinted.world.step(request))
    hinted.world.side.finished(request)
    tail = b"D" if adapter else b""
    keys = {request.block_hashes[units - 1] + tail for units in (CHUNK_UNITS, 2 * CHUNK_UNITS)}
    assert {key for key, _ in hinted.received} == keys
    assert request.request_id not in adapters._uses


@pytest.mark.parametrize("end", ["never admitted", "aborted", "preempted"])
def test_request_that_is_never_admitted_gets_no_hint(end: str) -> None:
    """A request that was never admitted has saved nothing, so the policy does not get its hint.

    The hint of an aborted or preempted request is passed to the policy.
    """
    hinted = HintedSide()
    request = hinted.world.request("a", CHUNK_UNITS)
    hinted.world.side.on_new_request(request, RawHints(None, {"demote": {}}))
    if end != "never admitted":
        hinted.world.admit(request)
        hinted.world.succeed(*hinted.world.step(request))
    if end == "preempted":
        hinted.world.preempt(request)
    hinted.world.side.finished(request)
    assert {hint for _, hint in hinted.received} == (set() if end == "never admitted" else {Hint(DEMOTE, NOW_S)})


def test_request_ends_when_the_policy_raises() -> None:
    """The request is not tracked any more and holds nothing."""
    hinted = HintedSide()
    request = hinted.arrive("a", 2 * CHUNK_UNITS, {"demote": {}})
    jobs = hinted.world.step(request)
    side: Any = hinted.world.side

    def broken(now_s: float, *, over: bool) -> None:
        if over:
            raise KeyError(now_s)

    side.catalog._request = broken
    with pytest.raises(KeyError):
        side.finished(request)
    side.catalog._request = None
    assert side.stats()["requests"] == 0
    hinted.world.succeed(*jobs)
    assert side.catalog.writing == 0


def test_policy_without_hints_gets_none() -> None:
    """If the policy accepts no hints, the hints of requests are not read."""
    hinted = HintedSide(takes_hints=False)
    request = hinted.arrive("a", CHUNK_UNITS, {"retain": {}}, [None] * 1000)
    hinted.world.succeed(*hinted.world.step(request))
    hinted.world.side.finished(request)
    assert hinted.counted("ignored") == {"policy": 1}
    assert hinted.counted("applied") == {}


def test_a_request_without_hints_costs_nothing() -> None:
    """Without hints, no hint is read, no chunk is looked up and no counter changes."""
    hinted = HintedSide()
    hinted.world.publish(hinted.world.request("a", 2 * CHUNK_UNITS))
    assert hinted.received == []
    assert not [name for name in hinted.world.side.stats() if name.startswith("hints_")]


@pytest.mark.parametrize("own", [{"retain": {}}, {"retain": {}, "resume": {"after_seconds": 1}}])
def test_hints_add_no_lookup_of_chunks(own: dict[str, Any]) -> None:
    """When the request ends, one lookup of its chunks serves all hints, just as without hints."""
    hinted = HintedSide()
    catalog: Any = hinted.world.side.catalog
    index = CountingIndex(catalog._index[0])
    catalog._index = (index,)
    probes = []
    for name, hints in (("plain", None), ("hinted", own)):
        request = hinted.arrive(name, 32 * CHUNK_UNITS, hints)
        hinted.world.succeed(*hinted.world.step(request))
        index.probes = 0
        hinted.world.side.finished(request)
        probes.append(index.probes)
    assert probes[1] == probes[0]


def _served(hints: object) -> list[int]:
    """Return the tokens that several requests are promised.

    Each request has `hints`. The pool has room for all of their chunks.
    """
    hinted = HintedSide()
    out = []
    for name in "abca":
        request = hinted.arrive(name, 2 * CHUNK_UNITS, hints)
        out.append(request.num_computed_tokens)
        hinted.world.succeed(*hinted.world.step(request))
        hinted.world.side.finished(request)
        hinted.world.check()
    return out


@pytest.mark.parametrize(
    "hints", [{"retain": {}}, {"demote": {}}, {"resume": {"after_seconds": 0}}, "nonsense"], ids=repr
)
def test_hints_change_no_answer(hints: object) -> None:
    """Hints do not change which held chunks are found."""
    assert _served(hints) == _served(None) == [0, 0, 0, 2 * CHUNK_UNITS * UNIT - 1]
