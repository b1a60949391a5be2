"""Tests of a tier's guard in one process: when it opens the tier again, and how it counts unanswered probes."""

from __future__ import annotations

import anyio
import pytest

from kvpipe.statemachine import breaker as m
from kvpipe.testing.held_tier import HeldTier
from kvpipe.testing.waiting import eventually
from kvpipe.tiers import guard
from kvpipe.tiers.base import TierError
from kvpipe.tiers.guard import FAULTS_MAX, READ
from tests.tiers.test_carrier import rank_of


class _SilentTier(HeldTier):
    """A tier whose probes get no answer while `trouble` is "hangs". `probes` is the number of probes."""

    probes = 0

    async def health(self) -> None:
        """See `Tier.health`."""
        self.probes += 1
        if self.trouble == "hangs":
            await anyio.sleep_forever()
        await super().health()


def test_tier_whose_probes_get_no_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe without an answer counts as a failure of reads and of writes.

    Only if the probe fails because the tier is full, the tier is still read.
    """
    tier = _SilentTier()
    with rank_of(tier) as rank:
        reads = rank.tiers[0].breakers[READ]
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        tier.trouble = "down"
        for _ in range(FAULTS_MAX):
            rank.carry(stores=False, slot=0)
            assert rank.ended() == [False]
        monkeypatch.setattr(guard, "OPEN_S_MAX", 0.01)
        patience_s, rank.tiers[0].timeout_s = rank.tiers[0].timeout_s, 0.001
        tier.trouble, probed = "hangs", tier.probes
        # two probes have ended when the third probe begins
        rank.probe_until(lambda: tier.probes >= probed + 3 or reads.allows)
        assert reads.state.row == m.OPEN
        tier.trouble, rank.tiers[0].timeout_s = "none", patience_s
        rank.probe_until(lambda: reads.allows)


def test_wait_doubles_while_a_tier_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between two tries doubles up to PROBE_S_MAX, and then stays so until the tier is open."""
    tier, waits, sleep = HeldTier(), list[float](), anyio.sleep

    async def fails() -> None:
        if len(waits) < 8:
            raise TierError("it is down")

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(tier, "open", fails)
    monkeypatch.setattr(anyio, "sleep", noted)
    monkeypatch.setattr(guard, "JITTER", 0.0)
    with rank_of(tier, probe_s=1.0) as rank:
        assert eventually(rank.tiers[0]._opened.is_set)
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
