"""The conformance suite of tiers finds each bug that an earlier version of the suite missed."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio.lowlevel
import anyio.to_thread
import pytest

from kvpipe.testing import waiting
from kvpipe.testing.tier_conformance import TierConformance, TierWorld
from kvpipe.tiers.base import Get, Put, Read, TierError, Written
from tests.tiers.whole_tier import T, Value, WholeTier, whole_world

SUITE = TierConformance()
Claim = Callable[[TierWorld], None]


class NeverDrops(WholeTier):
    """Bug: the tier ignores the bound."""

    def _make_room(self, size: int, values: dict[str, Value]) -> None:
        """Make no room."""


class DropsTheNewest(WholeTier):
    """Bug: the tier drops the newest values to make room, not the oldest values."""

    def _make_room(self, size: int, values: dict[str, Value]) -> None:
        if size <= self.bytes_max:
            while sum(len(value.bytes) for value in values.values()) + size > self.bytes_max:
                values.popitem()
        super()._make_room(size, values)


class KeepsTheAge(WholeTier):
    """Bug: a value that is written again keeps the age of the first write."""

    def _renew(self, name: str, values: dict[str, Value]) -> None:
        """Leave the age as it is."""


class OwnErrors(WholeTier):
    """Bug: the tier passes on exceptions of its client, except in `health`."""

    async def health(self) -> None:
        """See `Tier.health`."""
        try:
            await super().health()
        except OSError as error:
            raise TierError(str(error)) from error

    def _failed(self, error: OSError) -> Exception:
        return error


class GoesOn(WholeTier):
    """Bug: a cancelled call does not stop its thread."""

    async def _in_thread(self, work: Callable[[], T], stop: Callable[[], None]) -> T:
        del stop
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)

    def _write(self, put: Put) -> Written:
        # even on a fast machine, the thread is still working when it is interrupted
        time.sleep(0.001)
        return super()._write(put)

    def _read(self, get: Get) -> Read:
        time.sleep(0.001)
        return super()._read(get)


class OnTheLoop(WholeTier):
    """Bug: all work is done on the loop's thread, by functions that the suite does not watch."""

    async def _in_thread(self, work: Callable[[], T], stop: Callable[[], None]) -> T:
        del stop
        await anyio.lowlevel.checkpoint()
        return work()

    def _read(self, get: Get) -> Read:
        time.sleep(0.03)  # longer than the time on the loop's thread that the suite ignores
        return super()._read(get)


class KeepsItsFile(WholeTier):
    """Bug: `close` leaves a file open."""

    async def close(self) -> None:
        """Leave the file open."""
        self._fd, self.leaked = -1, self._fd


WHOLE_BUGS: list[tuple[Claim, type[WholeTier]]] = [
    (SUITE.test_the_bound_holds, NeverDrops),
    (SUITE.test_the_bound_holds, DropsTheNewest),
    (SUITE.test_the_oldest_are_dropped_first, KeepsTheAge),
    (SUITE.test_present_renews_the_age, KeepsTheAge),
    (SUITE.test_a_broken_store_raises_tier_errors, OwnErrors),
    (SUITE.test_a_read_ends_when_it_is_cancelled, GoesOn),
    (SUITE.test_a_write_ends_when_it_is_cancelled, GoesOn),
    (SUITE.test_the_loop_runs_during_calls, OnTheLoop),
    (SUITE.test_nothing_is_left_after_close, KeepsItsFile),
]
FAILED_BY_WHOLE_TIERS = {claim.__name__ for claim, _ in WHOLE_BUGS}


class TestWhole(TierConformance):
    """The tier without a bug passes every claim, and its world declares no `limits`."""

    @pytest.fixture
    def world(self) -> TierWorld:
        """Return an empty shelf."""
        return whole_world()


@pytest.mark.parametrize(("claim", "bug"), WHOLE_BUGS, ids=lambda one: one.__name__)
def test_a_claim_fails_for_one_bug_in_a_whole_tier(
    claim: Claim, bug: type[WholeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite fails for a tier with a bug that an earlier version of the suite missed."""
    monkeypatch.setattr(waiting, "EVENTUALLY_S", 0.5)
    world = whole_world(bug)
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        claim(world)
