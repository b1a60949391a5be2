"""Waypoints find the announced prompts that are a beginning of a request."""

from __future__ import annotations

import random
from typing import Any

from kvpipe.features import announced as a
from kvpipe.features.announced import Announcement, Announcements, KnownPrompt
from kvpipe.trace.log import Counters


class Counted(list[bytes]):
    """Hashes that count how often they are read."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        """Count the access, and return the hash."""
        self.looks += 1
        return super().__getitem__(at)


def test_announced_prompts_are_found_among_similar_prompts() -> None:
    """Few reads of hashes distinguish announced prompts that begin alike."""
    draw, all_, long = random.Random(7), Announcements(Counters()), 700
    trunk = [f"t/{at}".encode() for at in range(long)]

    def keys(name: str, shared: int, size: int) -> list[bytes]:
        return trunk[:shared] + [f"{name}/{at}".encode() for at in range(shared, size)]

    for number in range(a.ANNOUNCED_MAX):
        size = draw.randrange(1, long)
        asked = KnownPrompt(keys(f"p{number}", draw.choice([0, size // 2, size]), size), 0)
        all_.add(Announcement(asked, "", None, size - 1, 0.0, draw.uniform(0, 900)))
    some = [*all_.prompts.values()]
    prompts = [keys("new", shared, long) for shared in (0, 1, 64, 300, long - 1)] + [
        [*one.asked.block_hashes, b"more"] for one in draw.sample(some, 100)
    ]
    for hashes in prompts:
        there = all_.prompts.values()
        expected = [one for one in there if one.place < len(hashes) and hashes[one.place] == one.key]
        counted = Counted(hashes)
        found = all_.came(counted)
        assert sorted(found, key=id) == sorted(expected, key=id)
        assert [one.place for one in found] == sorted(one.place for one in found)
        assert counted.looks <= len(found) * 10 + 55, "the looks at its hashes grow with what is announced"
        for one in found:
            all_.add(one)
    all_.clear()
    assert not all_._waypoints
    assert (all_.due_s, all_.has_turn(0.0, idle=True)) == (float("inf"), False)
