"""A tenant is a salt and an adapter, and a chunk has the tenant of the request that saved it."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import Lru
from kvpipe.cache.quotas import Accounts
from kvpipe.cache.tenants import ANYBODY, SALT_KEPT_CHARS_MAX, AdapterIdentity, Tenants
from kvpipe.inputs.quota_spec import parse_quotas
from kvpipe.manage.holders import selecting
from kvpipe.manage.models import EvictMatching
from kvpipe.manage.salts import salt_digest
from kvpipe.trace.log import Counters
from tests.rigs.scheduler_world import SchedulerWorld


class _Asked:
    """The parts of a request that identify the tenant of the request's KV."""

    def __init__(self, salt: str | None = None, lora: Any = None) -> None:
        self.cache_salt, self.lora_request = salt, lora


class _Lora:
    lora_int_id, lora_name, lora_path, load_inplace, is_3d_lora_weight = 1, "french", "/french", False, False


def test_equal_salt_and_adapter_are_one_object() -> None:
    """Requests with equal salt and adapter share one `Tenant` object.

    A different salt or adapter gives another object.
    """
    tenants, asked = Tenants(), _Asked
    some: list[Any] = [asked("a"), asked("b"), asked("a", _Lora()), asked(None, _Lora())]
    found = [tenants.of(one, b"1" if one.lora_request else b"") for one in some]
    assert len({*found, ANYBODY}) == 5
    assert found == [tenants.of(one, b"1" if one.lora_request else b"") for one in some]
    assert tenants.of(some[2], b"2") not in found  # the adapter's files have changed
    assert [one.salt for one in found] == ["a", "b", "a", ""]
    assert found[3].adapter == AdapterIdentity("french", "/french", b"1")
    nobody: list[Any] = [asked(), asked(""), type("Old", (), {"lora_request": None})()]
    assert [tenants.of(one) for one in nobody] == [ANYBODY] * 3


def test_long_salt_is_kept_as_a_digest() -> None:
    """Chunks outlive requests, and an offline engine accepts salts of any length.

    A long salt is stored as a digest, which has the salt's quota.
    """
    tenants, long = Tenants(), [f"{'x' * 4000}{end}" for end in "ab"]
    some: list[Any] = [_Asked(salt) for salt in long]
    found = [tenants.of(one) for one in some]
    assert len({*found}) == 2
    assert [len(one.salt) for one in found] == [71, 71]
    assert found == [tenants.of(one) for one in some] == [tenants.named(one.salt, None) for one in found]
    accounts = Accounts(parse_quotas([{"name": "a", "salt": long[0]}]), 4, Lru)
    assert [accounts.of(one).spec.name for one in found] == ["a", "others"]
    assert [salt_digest(b"t", salt) for salt in long] == [salt_digest(b"t", one.salt) for one in found]
    selects = selecting(EvictMatching(cache_salt=long[0]), b"t")
    assert [selects(one) for one in found] == [True, False]
    short = "x" * SALT_KEPT_CHARS_MAX
    assert tenants.named(short, None).salt == short


def test_a_salt_never_stands_for_another_one() -> None:
    """A client may use the hash of a long salt as its own salt.

    The client is then another tenant, without the long salt's quota.
    """
    long = "x" * (SALT_KEPT_CHARS_MAX + 1)
    tenants, bare = Tenants(), hashlib.sha256(long.encode()).hexdigest()
    salts = [long, bare, tenants.named(long, None).salt.encode().decode(), f"sha256:{bare}"]
    salts += [tenants.named(salt, None).salt.encode().decode() for salt in salts]
    different = dict.fromkeys(salts)
    found = [tenants.named(salt, None) for salt in different]
    assert len({*found}) == len(different)
    assert len({salt_digest(b"t", salt) for salt in different}) == len(different)
    accounts = Accounts(parse_quotas([{"name": "a", "salt": long}]), 4, Lru)
    assert [accounts.of(one).spec.name for one in found] == ["a"] + ["others"] * (len(different) - 1)
    selects = selecting(EvictMatching(cache_salt=long), b"t")
    assert [selects(one) for one in found] == [True] + [False] * (len(different) - 1)


def test_salts_that_hold_nothing_are_forgotten() -> None:
    """The catalog keeps only tenants that have chunks, however many tenants have been served."""
    catalog = Catalog(4, 1, Lru(), Counters())
    for i in range(100):
        chunk = catalog.reserve(0, catalog.tenants.of(_Asked(str(i))))  # type: ignore[arg-type]
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 1, str(i).encode(), keep=False))
    chunk = None
    gc.collect()
    assert len(catalog.tenants) == 4
    catalog.reset()
    gc.collect()
    assert len(catalog.tenants) == 0


@pytest.mark.parametrize("states", [(), (1,)])
def test_saved_chunk_has_the_tenant_of_its_request(states: tuple[int, ...]) -> None:
    """Every chunk that a request reserves, of tokens or of a state, has the request's tenant."""
    world = SchedulerWorld(windows=(None, None) if states else (None,), states=states, chunk_units=4)
    for name, salt in (("r", "salt"), ("s", None), ("t", "salt")):
        request = world.request(name, 8)
        request.cache_salt = salt
        world.publish(request)
    by_salt: dict[str, int] = {}
    for chunk in world.side.catalog.chunks():
        by_salt[chunk.tenant.salt] = by_salt.get(chunk.tenant.salt, 0) + 1
    assert by_salt["salt"] == 2 * by_salt[""] > 0
    assert len({id(chunk.tenant) for chunk in world.side.catalog.chunks()}) == 2
