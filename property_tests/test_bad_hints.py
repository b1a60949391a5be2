"""Whatever comes as hints and parameters, nothing raises, all of it is counted, and answers are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.connectors.vllm.hints import CLASS, PARAMETER, hints_of, kind_of
from kvpipe.connectors.vllm.trial.scheduler_world import SchedulerWorld
from kvpipe.scheduler.hints import ACTIONS_MAX, PAYLOADS, PREFIX, RawHints
from property_tests.profiles import examples

TEXT = st.text(st.characters(), max_size=70)
"""With lone surrogates, which JSON may have."""
SCALARS = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | TEXT | st.just("x" * 100_000)
FIELDS = st.sampled_from(["ttl_seconds", "priority", "after_seconds", "execute_at", "block_hashes", CLASS])
KINDS = st.sampled_from([kind.removeprefix(PREFIX) for kind in PAYLOADS] + [CLASS, PARAMETER])
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
    """Run a request with all that, and one that goes on with it. Returns what is answered, and planned."""
    request, side = world.request(name, 6), world.side
    request.kv_hints, request.kv_transfer_params, request.cache_salt = envelope, parameters, salt
    request.all_token_ids = list(range(request.num_tokens))
    raw, before = hints_of(request), dict(side.counters)
    side.on_new_request(request, raw, kind_of(request))
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
def test_bad_hints(policy: str, envelope: object, parameters: object, salt: str | None) -> None:
    """Of every JSON type, at every place, as large as one likes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPIPE_POLICY", policy)
        worlds = SchedulerWorld(chunk_units=4, slots=8), SchedulerWorld(chunk_units=4, slots=8)
    assert _received(worlds[0], "r", salt, envelope, parameters) == _received(worlds[1], "r", salt, None, None)
    assert not worlds[0].side.counters.faults
