"""Hints, limits and parameters of any content raise no exception and are counted. Invalid values change no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.connectors.vllm.hints import PARAMETER, hints_of
from kvpipe.connectors.vllm.limits import LOAD_TIERS, LOAD_TOKENS, MATCHERS_MAX, SAVE_TOKENS, limits_of
from kvpipe.features.hints import ACTIONS_MAX, PAYLOADS, PREFIX
from kvpipe.scheduler.wishes import RawHints
from property_tests.profiles import examples
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

TEXT = st.text(st.characters(), max_size=70)
"""Texts that may contain lone surrogates, which JSON allows."""
SCALARS = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | TEXT | st.just("x" * 100_000)
FIELDS = st.sampled_from(["ttl_seconds", "priority", "after_seconds", "execute_at", "block_hashes"])
KINDS = st.sampled_from([kind.removeprefix(PREFIX) for kind in PAYLOADS] + [PARAMETER])
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | FIELDS | KINDS, inner, max_size=4),
    max_leaves=12,
)
PAYLOAD = JSON | st.dictionaries(FIELDS | TEXT, SCALARS, max_size=4)
OWN: st.SearchStrategy[Any] = (
    JSON
    | st.dictionaries(KINDS | TEXT, PAYLOAD, max_size=5)
    | st.just({str(i): {} for i in range(100_000)})
    | st.just({"retain": {str(i): i for i in range(100_000)}})
)
ACTIONS = st.builds(SimpleNamespace, action_type=st.sampled_from([*PAYLOADS]) | JSON, action_version=TEXT | SCALARS,
                    payload=PAYLOAD)  # fmt: skip
ENVELOPE: st.SearchStrategy[Any] = (
    st.none() | JSON | st.builds(SimpleNamespace, actions=JSON | st.lists(ACTIONS | JSON, max_size=ACTIONS_MAX + 2))
)


def _received(world: SchedulerWorld, name: str, salt: object, envelope: object, parameters: object) -> list[object]:
    """Run a request with these hints, and then a longer request. Return the lookups' answers and the plans."""
    request, side = world.request(name, 6), world.side
    request.kv_hints, request.kv_transfer_params, request.cache_salt = envelope, parameters, salt
    request.all_token_ids = list(range(request.num_tokens))
    raw, before = hints_of(request), dict(side.counters)
    side.on_new_request(request, raw)
    noted: list[object] = [world.ask(request), world.admit(request)]
    jobs = world.step(request)
    noted += [job.table()[:, 0].tolist() for job in jobs]
    world.succeed(*jobs)
    tracked = side.requests.tracked[name]
    received = side.counters["hints_ignored"] - before.get("hints_ignored", 0) + len(tracked.wishes)
    assert received > 0 or raw is None or not _means_anything(raw)
    assert received <= ACTIONS_MAX + 2
    side.finished(request)
    again = world.request(name, 7)
    again.cache_salt = salt
    side.on_new_request(again)
    noted.append(world.ask(again))
    side.finished(again)
    return noted


def _means_anything(raw: RawHints) -> bool:
    return any(stated is not None and not (isinstance(stated, list | tuple | dict) and not stated) for stated in raw)


@pytest.mark.parametrize("policy", ["sessions", "lru"])
@given(envelope=ENVELOPE, parameters=JSON | st.fixed_dictionaries({PARAMETER: OWN}), salt=st.none() | TEXT)
@examples(150)
def test_hints_of_any_json_type_change_no_answer(
    policy: str, envelope: object, parameters: object, salt: str | None
) -> None:
    """Hints of any JSON type and size, anywhere in a request's parameters, change no answer and cause no fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPIPE_POLICY", policy)
        worlds = SchedulerWorld(chunk_units=4, slots=8), SchedulerWorld(chunk_units=4, slots=8)
    assert _received(worlds[0], "r", salt, envelope, parameters) == _received(worlds[1], "r", salt, None, None)
    assert not worlds[0].side.counters.faults


MATCHER: st.SearchStrategy[Any] = JSON | st.fixed_dictionaries(
    {}, optional={"medium": JSON | st.sampled_from(["cpu", "STORAGE"]), "locality": JSON | st.just("local")}
)
LIMIT = JSON | st.integers(0, 200)
LIMITS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {}, optional={LOAD_TOKENS: LIMIT, SAVE_TOKENS: LIMIT, LOAD_TIERS: JSON | st.lists(MATCHER, max_size=MATCHERS_MAX)}
)


@given(parameters=LIMITS)
@examples(150)
def test_limits_of_any_json_type_apply_or_count_as_invalid(parameters: dict[str, Any]) -> None:
    """A limit of any JSON type either applies, or counts as invalid and limits nothing."""
    world = SchedulerWorld(chunk_units=4, slots=8)
    world.publish(world.request("first", 6, shared=7))
    request: Any = world.request("r", 7, shared=7)
    request.kv_transfer_params = parameters
    ignored: list[str] = []
    limits = limits_of(request, ignored.append)
    for name, limit in ((LOAD_TOKENS, limits.load_tokens_max), (SAVE_TOKENS, limits.save_tokens_max)):
        assert (limit is None) == (parameters.get(name) is None or name in ignored)
    assert ignored.count(LOAD_TIERS) <= MATCHERS_MAX
    world.side.on_new_request(request, None, limits)
    hit = world.admit(request)
    assert hit == 6 * UNIT if limits.load_tokens_max is None else hit <= limits.load_tokens_max
    world.succeed(*world.step(request))
    assert (world.found(request) == 7) == (limits.save_tokens_max is None or limits.save_tokens_max >= 7 * UNIT)
    world.side.finished(request)
    assert not world.side.counters.faults
