"""Tiers are asked about a prompt while the engine serves, in bounded time. Later lookups do not use these answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.cli import main as cli
from kvpipe.protocol.messages import Report
from kvpipe.statemachine import breaker as m
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, WAIT_S
from kvpipe.tiers.base import Key
from kvpipe.tiers.guard import FAULTS_MAX, FIND, guarded
from kvpipe.tiers.prefix_keys import chunk_name
from tests.manage.conftest import Managed
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

SPACE, CHUNK = "1" * 32, 16


@contextmanager
def serving(folder: Path, *tiers: HeldTier, space: str = SPACE, **world: Any) -> Iterator[Managed]:
    """Serve a side with tiers."""
    spec = DictSpec.model_validate(PATIENT)
    uses = guarded([(tier.name, spec, tier) for tier in tiers], (FIND,))
    managed = Managed(folder, SchedulerWorld(tiers=uses, **world))
    assert managed.side.staging is not None
    managed.side.staging.space.base = space
    try:
        yield managed
    finally:
        managed.server.stop()
        managed.side.shutdown()


def hold(tier: HeldTier, managed: Managed, name: str, *ends: int, group: int = 0) -> None:
    """Store chunks of the request `name` in a tier. `ends` are the units at which the chunks end."""
    keys = managed.world.request(name, max(ends)).block_hashes
    for units in ends:
        tier.values[Key(SPACE, chunk_name(keys[units - 1]), group, 0, 1).text] = b""


def lookup(managed: Managed, units: int, **more: Any) -> Any:
    """Look up the first units of the request `a`."""
    body = {"tokens": list(range(units * UNIT)), "cache_salt": "a", "tiers": True} | more
    return managed.good("POST", "/v1/lookup", body)


def of(answered: Any) -> dict[str, Any]:
    """Return the number of tokens in each tier, or the reason why the number is not known."""
    return {row["name"]: row["unknown"] or row["held_tokens"] // UNIT for row in answered["tiers"]}


def test_state_shows_a_slow_tier(tmp_path: Path) -> None:
    """The state shows the tier's read rate, as ranks have reported, and whether requests skip the tier."""
    with serving(tmp_path, HeldTier("far")) as managed:
        (tier,) = managed.good("GET", "/v1/state")["tiers"]
        assert (tier["read_bytes_per_s"], tier["slow"]) == (0.0, False)
        managed.side.reported(Report(tier_rates={0: 5.0}))
        assert managed.side.staging is not None
        managed.side.staging.patience.pace.s_per_token = 1e-9
        (tier,) = managed.good("GET", "/v1/state")["tiers"]
        assert (tier["read_bytes_per_s"], tier["slow"]) == (5.0, True)


def test_answer_has_memory_and_each_tier(tmp_path: Path) -> None:
    """The answer has the tokens in memory, in each tier alone, and in memory and all tiers together.

    No chunk is fetched or changed.
    """
    near, far = HeldTier("near"), HeldTier("far")
    with serving(tmp_path, near, far, space="") as managed:
        managed.save("a", 20)
        assert managed.side.staging is not None
        managed.side.staging.space.base = SPACE
        hold(near, managed, "a", CHUNK, 2 * CHUNK, 2 * CHUNK + 2)
        hold(far, managed, "a", 2 * CHUNK, 3 * CHUNK, 3 * CHUNK + 2)
        answered = lookup(managed, 60)
        assert answered["held_tokens"] == 20 * UNIT
        assert of(answered) == {"near": 2 * CHUNK + 2, "far": 0}  # the far tier lacks the first chunk
        assert answered["reach_tokens"] == 3 * CHUNK * UNIT
        assert answered["why"] == "not_saved"
        assert of(lookup(managed, 60, cache_salt="b")) == {"near": 0, "far": 0}
        assert lookup(managed, 60, tiers=False) == answered | {"tiers": [], "reach_tokens": None}
        assert "tier_lookup" not in managed.side.counters.totals()
        assert not managed.side.staging.pending
        managed.world.check()


def test_an_engine_without_tiers(managed: Managed) -> None:
    """Without tiers, the answer has memory only."""
    managed.save("a", 4)
    answered = lookup(managed, 8)
    assert (answered["held_tokens"], answered["reach_tokens"], answered["tiers"]) == (4 * UNIT, 4 * UNIT, [])


def test_states_and_windows_count_as_in_a_hit(tmp_path: Path) -> None:
    """A tier holds all tokens but only one state. The answer has the tokens up to this state."""
    tier = HeldTier("far")
    with serving(tmp_path, tier, windows=(None, None, None), states=(1, 2)) as managed:
        hold(tier, managed, "a", CHUNK, 2 * CHUNK)
        assert of(lookup(managed, 60)) == {"far": 0}
        hold(tier, managed, "a", 7, CHUNK + 5, 2 * CHUNK, group=1)
        assert of(lookup(managed, 60)) == {"far": 0}
        hold(tier, managed, "a", 7, CHUNK + 5, group=2)
        hold(tier, managed, "a", 2 * CHUNK - 1, 2 * CHUNK - 2)
        assert of(lookup(managed, 60)) == {"far": CHUNK + 5}


class Deaf(HeldTier):
    """A tier whose calls ignore cancellation."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        there = list[bool]()
        with anyio.CancelScope(shield=True):
            there += await super().exists(keys)
        return there


def test_a_tier_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    """The answer names a tier that is down, slow or not used now, with the reason. The other tiers answer.

    Later lookups do not use these answers.
    """
    good, bad, deaf = HeldTier("good"), HeldTier("bad"), Deaf("deaf")
    with serving(tmp_path, bad, deaf, good) as managed:
        hold(good, managed, "a", CHUNK)
        assert managed.side.staging is not None
        finder, survey = managed.side.staging.finder, managed.engine.survey
        lookup(managed, 20)  # this lookup opens all tiers
        bad.trouble = "down"
        for _ in range(2 * FAULTS_MAX):
            assert of(lookup(managed, 20)) == {"bad": "it is down", "deaf": 0, "good": CHUNK}
        survey.seconds_max = 0.05
        bad.trouble, deaf_too = "none", {"deaf": "no answer in time", "good": CHUNK}
        bad.hold()
        deaf.hold()
        assert of(lookup(managed, 20)) == {"bad": "no answer in time"} | deaf_too
        again = of(lookup(managed, 20))
        assert again["deaf"] == "the previous lookup in this tier has not ended"
        assert deaf.waiting == 1
        bad.let_go()
        deaf.let_go()
        survey.seconds_max = WAIT_S
        assert [tier.breakers[FIND].state.row for tier in finder.tiers] == [m.CLOSED] * 3
        finder.tiers[0].breakers[FIND].fault("it is slow", slow=True)
        finder.unreadable = frozenset({2})
        left = of(lookup(managed, 20))
        assert (left["bad"], left["good"]) == (
            "the tier is not used: its breaker is OPEN",
            "some rank does not read this tier at present",
        )
        assert managed.side.counters.faults == {}


def test_answer_has_the_reason_when_no_tier_can_be_asked(tmp_path: Path) -> None:
    """The reasons are unknown weights, an adapter that differs between ranks, and an engine that ends."""
    with serving(tmp_path, HeldTier("far"), space="") as managed:
        assert of(lookup(managed, 20)) == {"far": "this engine uses no tiers yet"}
        assert managed.side.staging is not None
        managed.side.staging.space.base = SPACE
        adapter = {"name": "x", "number": 7, "path": "/x"}
        answered = lookup(managed, 20, adapter=adapter)
        assert (of(answered)["far"], answered["why"]) == (
            "adapter: some rank does not hold it, or ranks hold different versions of it",
            "adapter",
        )
        managed.side.shutdown()
        asked = {"tokens": list(range(20 * UNIT)), "tiers": True}
        assert managed.ask("POST", "/v1/lookup", asked) == (503, {"error": "the engine is shutting down"})


@pytest.mark.parametrize("tiers", [1, "yes", None, []])
def test_tiers_must_be_true_or_false(tiers: object, managed: Managed) -> None:
    """`tiers` must be true or false."""
    status, answered = managed.ask("POST", "/v1/lookup", {"tokens": [1], "tiers": tiers})
    assert (status, answered["error"].split(",")[0]) == (422, "tiers: Expected `bool`")


def test_command_prints_a_line_for_each_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a line for each tier."""
    tier = HeldTier("far")
    with serving(tmp_path, tier) as managed:
        hold(tier, managed, "a", CHUNK)
        at = ["--at", str(managed.address), "--token-file", str(tmp_path / "token")]
        ids = ",".join(map(str, range(CHUNK * UNIT)))
        assert cli.main(["cache", "lookup", ids, "--salt", "a", *at, "--tiers"]) == 0
        stated = capsys.readouterr().out
        assert "reach_tokens" in stated
        assert "far" in stated
        assert cli.main(["cache", "lookup", ids, "--salt", "a", *at]) == 0
        assert "reach_tokens" not in capsys.readouterr().out
