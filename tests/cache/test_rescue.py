"""If a policy of kvpipe raises an exception, LRU replaces the policy, and no slot and no lease is lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import Lru, S3Fifo, Sessions, make_policy
from kvpipe.cache.policy.duel import Duel
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.cache.tenants import Tenant
from kvpipe.inputs.quota_spec import QuotaSpec
from kvpipe.trace.log import Counters

SLOTS = 6
CALLS = (
    "request",
    "answered",
    "insert",
    "insert_all",
    "remove",
    "remove_all",
    "refresh_all",
    "hint",
    "victim",
    "dropped",
)


@pytest.fixture
def faults() -> list[str]:
    """Return the policies that have failed."""
    return []


def _catalog(policy: str, faults: list[str], *, shared: bool = False) -> Catalog:
    def make(slots: int) -> Any:
        return make_policy(policy, slots, lambda event, **stated: faults.append(f"{event} {stated['policy']}"))

    clock = count()
    if shared:
        quotas = [QuotaSpec.model_validate({"name": "a", "salt": "a", "share": 0.5, "limit": 0.5})]
        return SharedCatalog(SLOTS, 1, Accounts(quotas, SLOTS, make), Counters(), clock=lambda: float(next(clock)))
    return Catalog(SLOTS, 1, make(SLOTS), Counters(), clock=lambda: float(next(clock)))


def _save(catalog: Catalog, key: bytes, before: bytes = b"") -> Chunk:
    chunk = catalog.reserve(0)
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, 1, key, keep=True, before=before))
    return chunk


def _life(catalog: Catalog, keys: Iterator[bytes]) -> None:
    """Save, hint, grow, load, use and finish a prompt of two chunks and another prompt. Evict the last chunk."""
    prompt = list[Chunk]()
    for _ in range(2):
        first = next(keys)
        prompt = [_save(catalog, first), _save(catalog, next(keys), before=first)]
        catalog.hint(prompt, Hint(Action.RESUME, 1e6))
        assert catalog.landed(catalog.write(prompt[1], 2, next(keys), keep=False))
        catalog.lease(Owner("r", 0), prompt)
        catalog.release(Owner("r", 0))
        catalog.refresh(prompt[::-1], answer=3)
    assert catalog.evict(prompt[1])


@pytest.mark.parametrize("shared", [False, True])
def test_a_policy_that_raises_when_its_pool_is_sized_is_replaced(
    monkeypatch: pytest.MonkeyPatch, faults: list[str], *, shared: bool
) -> None:
    """The policy raises before any chunk is saved. LRU serves the pool from the beginning."""
    monkeypatch.setattr(Duel, "sized", lambda *_: 1 / 0)
    catalog = _catalog("sessions", faults, shared=shared)
    assert faults
    assert set(faults) == {"policy_failed sessions"}
    for at in range(2 * SLOTS):
        _save(catalog, b"%d" % at)
    assert catalog.used <= SLOTS


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", ["sessions", "s3fifo"])
@pytest.mark.parametrize("call", CALLS)
def test_built_in_policy_that_raises_is_replaced(
    monkeypatch: pytest.MonkeyPatch, faults: list[str], call: str, policy: str, *, shared: bool
) -> None:
    """Any call may raise at any time: no slot is lost, and chunks that a request holds are not evicted."""
    kind: type[Any] = {"sessions": Sessions, "s3fifo": S3Fifo}[policy]
    call = call.removesuffix("_all") if shared else call  # with quotas, the policy is called for one chunk at a time
    original = getattr(kind, call, None)
    if original is None:
        return
    for sound in range(12):
        left = count(sound, -1)

        def raises(*args: Any, left: Iterator[int] = left, **named: Any) -> Any:
            if next(left) <= 0:
                raise RuntimeError
            return original(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(kind, call, raises)
            catalog, keys = _catalog(policy, faults, shared=shared), (str(one).encode() for one in count())
            for _ in range(3):
                _life(catalog, keys)
            held = [_save(catalog, next(keys)) for _ in range(2)]
            catalog.lease(Owner("held", 0), held)
            there = [chunk for chunk in (catalog.reserve(0) for _ in range(SLOTS)) if chunk is not None]
            assert len(there) == SLOTS - len(held)
            assert all(catalog.holds(chunk) for chunk in held)
            assert catalog.release(Owner("held", 0)) == len(held)
            for chunk in there:
                catalog.abandon(chunk)
            catalog.reset()
            assert catalog.used == 0
    assert set(faults) <= {f"policy_failed {policy}"}
    assert len(faults) >= 5  # at least five of the twelve trials fail, and each failure is counted once


def test_rescuing_lru_evicts_the_least_recently_used_chunk_first(
    monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    """The LRU that replaces a failed policy starts with the pool's own order of uses."""
    catalog = _catalog("sessions", faults)
    chunks = [_save(catalog, key) for key in (b"a", b"b", b"c", b"d", b"e", b"f")]
    catalog.refresh([chunks[0]])
    monkeypatch.setattr(Sessions, "victim", lambda _: 1 / 0)
    for _ in range(4):
        assert catalog.reserve(0) is not None
    assert [catalog.holds(chunk) for chunk in chunks] == [True, False, False, False, False, True]
    assert faults == ["policy_failed sessions"]


@pytest.mark.parametrize("shared", [False, True])
def test_rescuing_lru_takes_no_hints(monkeypatch: pytest.MonkeyPatch, faults: list[str], *, shared: bool) -> None:
    """Hints for a pool with the rescuing LRU are not counted as applied.

    With quotas, hints are ignored once the policies of all accounts have failed.
    """
    catalog = _catalog("sessions", faults, shared=shared)
    assert catalog.takes_hints
    monkeypatch.setattr(Sessions, "insert", lambda *_, **__: 1 / 0)
    salts = ("a", "b") if shared else ("",)
    for number, salt in enumerate(salts, 1):
        chunk = catalog.reserve(0, Tenant(salt))
        assert chunk is not None
        assert catalog.landed(catalog.write(chunk, 1, b"of " + salt.encode(), keep=True))
        assert catalog.takes_hints == (number < len(salts))
    assert faults == ["policy_failed sessions"] * len(salts)


def test_lru_has_nothing_to_be_replaced_by(faults: list[str]) -> None:
    """LRU needs no replacement, so it is not wrapped."""
    assert type(make_policy("lru", 4, faults.append)) is Lru
