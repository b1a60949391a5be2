"""A tenant that announces prompts takes neither remembered announcements nor turns from another tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from kvpipe.cache.tenants import Tenant
from kvpipe.features import announced as a
from kvpipe.features.announced import Announcement, Announcements
from kvpipe.trace.log import Counters
from tests.trials.test_announced import PAUSE_S, RESUME, ROOMY, Clock, over, remembered, steps
from tests.trials.test_fetches import Played, in_play


def announce(played: Played, salt: int, documents: Iterable[int], pause_s: int) -> None:
    """For each document, run one short request with `cache_salt` `salt`.

    The request ends with a resume hint for `pause_s` seconds later.
    """
    for document in documents:
        played.do(("hint", RESUME, pause_s), ("add", document, 40, 0, 3, salt, 0), ("drain",))


def announced_by(played: Played) -> Counter[str]:
    """Return the number of announced prompts by salt."""
    return Counter(one.asked.cache_salt for one in played.trial.side.prefetching.announced.prompts.values())


def test_announcements_of_a_salt_stay_when_another_salt_announces_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many announcements, the salt with the most announcements loses some, even its earliest."""
    monkeypatch.setattr(a, "ANNOUNCED_MAX", 3)
    with in_play(ROOMY) as played:
        announce(played, 1, [0], PAUSE_S)
        announce(played, 2, [1, 2, 3, 0], PAUSE_S // 2)
        assert announced_by(played) == {"1": 1, "2": 2}
        assert over(played, "too_many") == 2


def test_prompts_of_salts_are_fetched_in_turn_when_one_salt_announces_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A salt waits for one prompt of each other salt, even if many prompts of others have earlier announced times."""
    with in_play(ROOMY) as played:
        clock = Clock(played)
        announce(played, 2, [1, 2, 3], PAUSE_S)
        announce(played, 1, [0], PAUSE_S + 1)
        taken: list[str] = []
        real = Announcements.take

        def take(self: Announcements, now_s: float, *, idle: bool) -> Announcement | None:
            one = real(self, now_s, idle=idle)
            if one is not None:
                taken.append(one.asked.cache_salt)
            return one

        monkeypatch.setattr(Announcements, "take", take)
        clock.now_s += PAUSE_S - 1
        steps(played)
        assert sorted(taken) == ["1", "2", "2", "2"]
        assert "1" in taken[:2]


def test_a_salt_with_a_quota_keeps_its_announcements_when_a_client_invents_salts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All salts without a quota count as one quota. This quota has the most announcements, so it loses some."""
    monkeypatch.setattr(a, "ANNOUNCED_MAX", 4)
    all_ = Announcements(Counters(), account=lambda tenant: tenant.salt == "alice")
    for name, salt in (("a", "alice"), ("b", "alice"), ("c", "x1"), ("d", "x2"), ("e", "x3"), ("f", "x4")):
        all_.add(remembered(name, 30, tenant=Tenant(salt)))
    assert {one.request_id for one in all_.prompts.values()} == {"a", "b", "e", "f"}


def test_a_salt_with_few_hashes_keeps_its_prompts_when_another_salt_has_many_hashes() -> None:
    """A few long prompts take as much memory as many short prompts, so hashes are counted instead of prompts."""
    all_ = Announcements(Counters(), hashes_max=40)
    for name, salt, hashes, pause_s in (("a", "alice", 4, 90), ("b", "bob", 16, 50), ("c", "bob", 16, 20)):
        all_.add(remembered(name, pause_s, hashes, tenant=Tenant(salt)))
    all_.add(remembered("d", 80, 8, tenant=Tenant("alice")))
    assert {one.request_id for one in all_.prompts.values()} == {"a", "c", "d"}
