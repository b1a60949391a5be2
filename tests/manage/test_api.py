"""Operators see the state of the engine, and set its switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe import __version__
from kvpipe.cli import main as cli
from kvpipe.testing.catalog_integrity import check_integrity
from tests.manage.conftest import Managed
from tests.rigs.scheduler_world import UNIT


def prompt(name: str, tokens: int) -> dict[str, Any]:
    """Return a prompt that is equal to the prompt of the request with this name."""
    return {"tokens": list(range(tokens)), "cache_salt": name}


def test_state_shows_the_pool_the_holders_and_jobs_in_flight(managed: Managed) -> None:
    """The state shows the chunks in the pool, the requests that hold chunks, and the jobs in flight."""
    world = managed.world
    managed.save("a", 20)
    loading = world.request("b", 3)
    world.admit(loading)
    (job,) = world.step(loading)
    answered = managed.good("GET", "/v1/state")
    assert (answered["kvpipe"], answered["engine"], answered["namespace"]) == (__version__, "e1", "")
    pool, side = answered["pool"], managed.side
    assert (pool["slots"], pool["slots_used"]) == (side.catalog.slots, 3)
    assert pool["bytes_used"] == 3 * side.geometry.slot_bytes
    assert pool["pieces_writing"] == 1
    bytes_of_three = 3 * sum(group.bytes_per_block for group in side.geometry.groups)
    jobs = {"saves": 1, "loads": 0, "tier_orders": 0, "load_bytes": 0, "tier_bytes_max": 0}
    assert answered["jobs"] == {**jobs, "save_bytes": bytes_of_three}
    assert answered["traffic"]["missed_tokens"] == {"not_saved": 23 * UNIT}
    rows = {row["request"]: row for row in answered["requests_shown"]}
    assert rows["a"]["saved_tokens"] == 20 * UNIT
    assert (answered["requests"], answered["step"], answered["saving"]) == (2, 2, True)
    world.succeed(job)
    shown = managed.good("GET", "/v1/state?requests_max=1")
    assert (len(shown["requests_shown"]), shown["requests"], shown["jobs"]["saves"]) == (1, 2, 0)


def test_request_that_loads_is_shown_as_a_holder(managed: Managed) -> None:
    """A request whose load is in flight holds its chunks until the load has ended."""
    managed.save("a", 32)
    again = managed.world.request("a", 33)
    again.request_id = "reader"
    managed.world.admit(again)
    jobs = managed.world.step(again)
    answered = managed.good("GET", "/v1/state")
    assert [row["chunks_held"] for row in answered["requests_shown"] if row["request"] == "reader"] == [2]
    assert answered["pool"]["leases"] == 2
    managed.world.succeed(*jobs)
    assert managed.good("GET", "/v1/state")["pool"]["leases"] == 0


def test_answer_has_all_counters_and_gauges(managed: Managed) -> None:
    """The answer has all counters and gauges by name, including those of the management interface."""
    managed.save("a", 4)
    answered = managed.good("GET", "/v1/counters")
    assert answered["units_saved"] == 4
    assert answered["slots_used"] == 1
    assert answered["manage_requests"] == 1


def test_lookup_returns_the_hit_of_a_request(managed: Managed) -> None:
    """A lookup returns the hit of a request with this prompt and salt: whole units from the beginning."""
    managed.save("a", 20)
    assert managed.good("POST", "/v1/lookup", prompt("a", 20 * UNIT)) == {
        "tokens": 20 * UNIT,
        "held_tokens": 20 * UNIT,
        "why": "",
        "reach_tokens": None,
        "tiers": [],
    }
    longer = managed.good("POST", "/v1/lookup", prompt("a", 25 * UNIT + 1))
    assert (longer["held_tokens"], longer["why"]) == (20 * UNIT, "not_saved")
    other = managed.good("POST", "/v1/lookup", prompt("b", 20 * UNIT))
    assert (other["held_tokens"], other["why"]) == (0, "not_saved")
    short = managed.good("POST", "/v1/lookup", {"tokens": [1]})
    assert (short["tokens"], short["held_tokens"], short["why"]) == (1, 0, "below_minimum")
    check_integrity(managed.side.catalog)


def test_lookup_of_an_adapters_prompt(managed: Managed) -> None:
    """If all ranks hold the same adapter, the keys of the adapter's prompts end with the digest of its bytes."""
    asked = prompt("a", 4 * UNIT) | {"adapter": {"name": "x", "number": 7, "path": "/x"}}
    managed.save("a", 4)
    assert managed.good("POST", "/v1/lookup", asked)["why"] == "adapter"
    managed.side.adapters.reported({0: {7: b"bytes"}}, 1)
    assert managed.good("POST", "/v1/lookup", asked)["held_tokens"] == 0
    request = managed.world.request("c", 4)
    request.block_hashes = [key + b"bytes" for key in managed.world.request("a", 4).block_hashes]
    managed.world.prefixes |= dict.fromkeys(request.block_hashes, request.block_hashes)
    managed.world.admit(request)
    managed.world.succeed(*managed.world.step(request))
    assert managed.good("POST", "/v1/lookup", asked)["held_tokens"] == 4 * UNIT
    assert managed.good("GET", "/v1/state")["adapters"] == [{"number": 7, "digest": b"bytes".hex()}]


def test_switch_takes_effect_with_the_next_step(managed: Managed) -> None:
    """A switch takes effect with the next step.

    Switching freeze and bypass on together is refused as a contradiction.
    """
    assert managed.good("PUT", "/v1/switches", {"freeze": True}) == {"freeze": True, "bypass": False}
    request = managed.world.request("a", 4)
    managed.world.admit(request)
    assert managed.world.step(request) == []
    status, answered = managed.ask("PUT", "/v1/switches", {"bypass": True})
    assert (status, answered) == (
        422,
        {"error": "bypass contradicts freeze (bypass serves no hits, freeze does); switch one of them off"},
    )
    assert managed.good("GET", "/v1/switches") == {"freeze": True, "bypass": False}
    assert managed.good("PUT", "/v1/switches", {"freeze": False, "bypass": True}) == {"freeze": False, "bypass": True}
    assert managed.good("PUT", "/v1/switches", {"bypass": False}) == {"freeze": False, "bypass": False}
    assert len(managed.world.step(request)) == 1
    assert managed.refused("request") == 1


def test_openapi_is_complete(managed: Managed) -> None:
    """The OpenAPI document describes every path. Only clients with the token may read it."""
    answered = managed.good("GET", "/openapi.json")
    read = {"/v1/state", "/v1/counters", "/v1/switches", "/v1/lookup", "/v1/holders"}
    assert set(answered["paths"]) == read | {
        "/v1/pins",
        "/v1/pins/{pin}",
        "/v1/evict",
        "/v1/evict/matching",
        "/v1/warm",
        "/v1/orders/{order}",
    }
    schema = answered["paths"]["/v1/lookup"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/PromptLookup"}
    schema = answered["paths"]["/v1/evict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/EvictOrder"}
    schema = answered["paths"]["/v1/evict/matching"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/EvictMatching"}
    assert {"PromptLookup", "HeldByTier", "PinOrder", "EvictOrder", "AdapterOf", "EngineState"} <= set(
        answered["components"]["schemas"]
    )
    assert managed.ask("GET", "/openapi.json", token="")[0] == 401
    assert managed.ask("GET", "/docs")[0] == 404


def test_commands_answer_as_http_does(managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`kvpipe engine` and `kvpipe cache` return the same answers as HTTP."""
    managed.save("a", 20)
    at = ["--at", str(managed.address), "--token-file", str(tmp_path / "token")]
    assert cli.main(["engine", "state", *at]) == 0
    assert "pool.slots_used" in capsys.readouterr().out
    (tmp_path / "ids").write_text(str(list(range(20 * UNIT))), encoding="utf-8")
    assert cli.main(["cache", "lookup", f"@{tmp_path}/ids", "--salt", "a", "--json", *at]) == 0
    assert f'"held_tokens": {20 * UNIT}' in capsys.readouterr().out
    assert cli.main(["engine", "switch", "--freeze", "on", *at]) == 0
    assert managed.side.switches.freeze
    assert cli.main(["engine", "switch", "--bypass", "on", *at]) == 2
    assert "refused (422): bypass contradicts freeze" in capsys.readouterr().err
    assert cli.main(["engine", "counters", *at]) == 0
    assert "manage_requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wording"),
    [
        (["cache", "lookup", "1,x", "--server", "http://127.0.0.1:1"], "none answers at http://127.0.0.1:1 ("),
        (["cache", "lookup", "@/nowhere"], "/nowhere cannot be read"),
        (["cache", "lookup", "1", "--adapter", "x", "y", "z"], "the adapter's number must be a whole number"),
        (["engine", "switch"], "give --freeze on|off"),
        (["engine", "state", "--at", "here"], "--at here: write 'unix:/"),
        (["cache", "pins", "--at", ""], "no address is given; give --at"),
        (["engine", "state", "--at", "unix:/run/{engine}.sock"], "no engine listens at unix:/run/{engine}.sock; start"),
        (["engine", "state", "--at", "unix:/nowhere/x.sock"], "no engine answers at unix:/nowhere/x.sock"),
    ],
)
def test_command_prints_one_sentence_for_an_error(
    words: list[str], wording: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command prints one sentence and has status 2."""
    file = tmp_path / "token"
    file.write_text("x" * 32, encoding="utf-8")
    at = [] if "--at" in words else ["--at", "127.0.0.1:1"]
    assert cli.main([*words, *at, "--token-file", str(file)]) == 2
    assert wording in capsys.readouterr().err


@pytest.mark.parametrize(
    "token", ["t0" * 16 + "\n" + "s1" * 16, "t0" * 16 + " s1", "t0" * 16 + "ü", "t0" * 16 + "\x7fs1"]
)
def test_the_command_does_not_show_a_token_that_no_header_can_hold(
    token: str, managed: Managed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For example, a token file with two lines has such a token.

    The command refuses the token like the engine does, even if no engine answers.
    """
    file = tmp_path / "bad"
    file.write_text(token, encoding="utf-8")
    for at in (str(managed.address), "unix:/nowhere/x.sock"):
        assert cli.main(["engine", "state", "--at", at, "--token-file", str(file)]) == 2
        stated = "".join(capsys.readouterr())
        assert "manage_token: it has a blank, or a character that is not printable ASCII; make a token" in stated
        assert not [word for word in ("t0t0", "s1", "Bearer") if word in stated]
    assert "manage_requests" not in managed.side.counters.totals()
