"""`kvpipe top` shows engines that answer and engines that do not answer. It prints names from clients safely."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from kvpipe.cli import main as cli
from kvpipe.cli import screen, seen, top
from kvpipe.inputs.listening import Address
from kvpipe.manage.models import EngineState, Holders, RequestHolds
from kvpipe.manage.salts import salt_digest
from kvpipe.testing.waiting import WAIT_S
from tests.manage.conftest import TOKEN, Managed
from tests.manage.test_client import answering
from tests.rigs.interrupts import interrupts_enabled
from tests.rigs.scheduler_world import UNIT


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine answer as slowly as all other tests allow."""
    monkeypatch.setattr(seen, "ANSWER_S_MAX", WAIT_S)
    monkeypatch.setattr(top, "ANSWER_S_MAX", WAIT_S)


def drawn(*engines: seen.SeenEngine, requests_max: int = 10, size: tuple[int, int] = (120, 0)) -> str:
    """Return the text on a screen of `size` (columns, lines). If `lines` is 0, the screen is as long as needed."""
    console = Console(width=size[0], height=size[1] or 25, record=True, file=io.StringIO())
    console.print(screen.screen(engines, requests_max, console, fits=size[1] > 0))
    return console.export_text()


async def looked_at(watch: seen.EngineList, wait_s_max: float = WAIT_S) -> None:
    """Return all engines after one update."""
    async with anyio.create_task_group() as group:
        await watch.look(group, wait_s_max)
        group.cancel_scope.cancel()


def looked(managed: Managed, token: str = TOKEN) -> seen.SeenEngine:
    """Return the view's data of an engine that was asked once."""
    engine = seen.SeenEngine(managed.address)
    with managed.idle():
        anyio.run(engine.look, token)
    return engine


def state(managed: Managed, **changed: Any) -> EngineState:
    """Return the engine's state, with the values in `changed` replaced."""
    answered = managed.good("GET", "/v1/state")
    return EngineState.model_validate(
        {**answered, **{k: {**answered[k], **v} if isinstance(v, dict) else v for k, v in changed.items()}}
    )


@pytest.fixture
def folder(managed: Managed) -> Path:
    """Return the folder of the engine's socket."""
    return Path(managed.address.path).parent


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Managed]:
    """Yield a second served side."""
    (tmp_path / "2").mkdir()
    one = Managed(tmp_path / "2")
    yield one
    one.server.stop()


def test_view_shows_hits_misses_pool_and_requests(managed: Managed) -> None:
    """The view has hits by tier, misses by reason, the pool, copies in flight, and the slowest requests."""
    managed.save("a", 20)
    again = managed.world.request("a", 30)
    again.request_id = "again"
    managed.world.admit(again)
    managed.world.step(again)
    engine = looked(managed)
    shown = drawn(engine)
    assert "● e1" in shown
    assert "2 requests" in shown
    assert f"40 % of {50 * UNIT} tokens vLLM lacked since it began, memory 40 %" in shown
    assert "not_saved 60 %" in shown
    assert "1 % of 1.0 MiB, 2 leases" in shown
    assert "saves 1 (640 B), loads 1 (1.2 KiB)" in shown
    assert "tiers" not in shown
    rows = [line.split()[:2] for line in shown.splitlines() if "WAITING" in line]
    assert rows == [["a", "RUNNING"], ["again", "LOADING"]]
    assert "again" not in drawn(engine, requests_max=1)
    assert "users" not in shown  # the table of users is missing, because no chunk has a salt


def test_largest_holder_is_shown_first(managed: Managed) -> None:
    """The largest holder of the pool comes first, with its guaranteed share and its largest possible share."""
    engine = looked(managed)
    quotas = [
        {"name": "alice", "slots": 2, "slots_sure": 4, "slots_max": 8},
        {"name": "others", "slots": 3, "slots_sure": 0, "slots_max": 16},
    ]
    assert managed.good("GET", "/v1/state")["pool"]["quotas"] == []
    engine.took(state(managed, pool={"quotas": quotas, "slots": 16}), time.monotonic())
    lines = drawn(engine).splitlines()
    first = next(at for at, line in enumerate(lines) if "others" in line)
    assert "19 % others, 0 % guaranteed, 100 % at most" in lines[first]
    assert "12 % alice, 25 % guaranteed, 50 % at most" in lines[first + 1]


def test_users_are_shown_by_their_salts(managed: Managed) -> None:
    """The user with the most chunks comes first. Users that have no line are counted together."""
    slots = managed.side.catalog.slots
    for number in range(7):
        managed.save(f"u{number}", 16 * (number + 1), salt=f"salt{number}")
    managed.save("x", 16)
    engine = looked(managed)
    lines = drawn(engine).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("  users"))
    for at in range(screen.USERS_MAX):
        digest = salt_digest(TOKEN.encode(), f"salt{6 - at}")
        assert f"{100 * (7 - at) / slots:.0f} % {digest}, idle 0:00:0" in lines[first + at]
    assert lines[first + screen.USERS_MAX - 1].rstrip().endswith(f"; 3 more {100 * 4 / slots:.0f} %")
    managed.save("y", 16, salt="salt6")
    anyio.run(engine.look, TOKEN)
    assert drawn(engine).splitlines()[first].rstrip() == lines[first].rstrip()  # the pool is not counted at each update


def test_the_slowest_requests_are_shown(managed: Managed) -> None:
    """Requests without a first token come first, by age. Then come requests that get few tokens per second."""
    old = 10**9
    for name, age_s, answered in (("quick", 9, 90), ("new", 1, 0), ("slow", 9, 3), ("waits", 8, 0)):
        request = managed.world.request(name, 4)
        managed.world.admit(request)
        request.num_tokens += answered
        managed.side.requests.tracked[name].life.added_ns -= age_s * old
    assert [one["request"] for one in managed.good("GET", "/v1/state?requests_max=3")["requests_shown"]] == [
        "waits", "new", "slow",
    ]  # fmt: skip
    lines = drawn(looked(managed)).splitlines()
    first = next(at for at, line in enumerate(lines) if "slowest requests" in line)
    assert [line.split()[0] for line in lines[first + 2 : first + 6]] == ["waits", "new", "slow", "quick"]
    assert lines[first + 4].split()[-4:] == ["3", "0", "0", "0"]


def test_engine_that_hangs_delays_no_other_engine(managed: Managed, folder: Path) -> None:
    """The view shows the engine as late, with its last answer. The engine is not asked again before it has answered."""
    quiet = socket.socket(socket.AF_UNIX)
    quiet.bind(f"{folder}/quiet.sock")
    quiet.listen()
    watch = seen.EngineList([Address.parse(f"unix:{folder}/{{engine}}.sock")], TOKEN)

    async def looks() -> str:
        async with anyio.create_task_group() as group:
            began_s = time.monotonic()
            for _ in range(2):
                await watch.look(group, 0.3)
                await next(one for one in watch.engines if one.address.path.endswith("/e1.sock")).settled.wait()
            assert time.monotonic() - began_s < WAIT_S / 2
            shown = drawn(*watch.engines)
            group.cancel_scope.cancel()
        return shown

    shown = anyio.run(looks)
    assert "● e1" in shown
    assert any("quiet.sock" in line and "no answer for " in line for line in shown.splitlines())
    quiet.setblocking(False)
    quiet.accept()[0].close()
    with pytest.raises(BlockingIOError):
        quiet.accept()
    quiet.close()
    one = looked(managed)
    one._asked_at_s = time.monotonic() - 3
    assert "no answer for 3." in next(line for line in drawn(one).splitlines() if "● e1" in line)


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (80, 17), (80, 12)])
def test_view_fits_the_terminal(managed: Managed, size: tuple[int, int]) -> None:
    """The lines fit the terminal's width and height, and a terminal of 17 lines or more has room for requests."""
    for number in range(7):
        managed.save(f"chatcmpl-{number:032x}", 16 * (number + 1), salt=f"salt{number}")
    one = looked(managed)
    tier = {"name": "near", "kind": "disk", "breaker": "OPEN", "left_by_ranks": False}
    lived = {"hit_tokens": {"memory": 10**9, "near": 10**8}, "missed_tokens": {"not_saved": 10**9, "evicted": 5}}
    one.took(state(managed, tiers=[tier], traffic=lived), time.monotonic())
    lines = drawn(one, size=size).splitlines()
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    shown = sum("idle" in line for line in lines), sum("RUNNING" in line for line in lines)
    assert shown == {24: (5, 7), 30: (5, 7), 17: (1, 4), 12: (0, 0)}[size[1]]


def test_rates_cover_the_last_seconds(managed: Managed) -> None:
    """Rates cover the last seconds only. They need two answers, so `top` shows no rates directly after a restart."""
    engine = seen.SeenEngine(managed.address)
    old = {"hit_tokens": {"memory": 1000}, "missed_tokens": {"not_saved": 0}, "evicted": 5}
    new = {"hit_tokens": {"memory": 1000, "disk": 25}, "missed_tokens": {"not_saved": 50, "evicted": 25}, "evicted": 25}
    engine.took(state(managed, step=50), 0.0)
    engine.took(state(managed, step=100, traffic=old), 10.0)
    engine.took(state(managed, step=600, traffic=new), 20.0)
    shown = drawn(engine)
    assert "50 steps/s" in shown
    assert "25 % of 100 tokens vLLM lacked in 10 s, disk 25 %; 93 % since it began" in shown
    assert "not_saved 50 %, evicted 25 %" in shown
    assert "2.0 evictions/s" in shown
    engine.took(state(managed, step=601, traffic=new), 30.0)
    assert "93 % of 1,100 tokens vLLM lacked since it began" in drawn(engine)
    engine.took(state(managed, step=3), 40.0)
    assert "steps/s" not in drawn(engine)
    engine.took(state(managed, step=13), 50.0)
    assert "1 steps/s" in drawn(engine)
    engine.took(state(managed, engine="zzzzzzzz", step=900, up_s=50.0), 60.0)  # another engine at the same address
    assert "steps/s" not in drawn(engine)
    engine.took(state(managed, engine="zzzzzzzz", step=990, up_s=5.0), 70.0)  # the engine has started again
    assert "steps/s" not in drawn(engine)


def test_faults_switches_and_failed_tiers_are_shown(managed: Managed) -> None:
    """Faults, switches, and tiers that are not used are shown."""
    tiers = [
        {"name": "near", "kind": "disk", "breaker": "CLOSED", "left_by_ranks": False},
        {"name": "far", "kind": "s3", "breaker": "OPEN", "left_by_ranks": False},
        {"name": "odd", "kind": "redis", "breaker": "CLOSED", "left_by_ranks": True},
        {"name": "old", "kind": "disk", "breaker": "CLOSED", "left_by_ranks": False, "read_bytes_per_s": 2e9},
    ]
    engine = seen.SeenEngine(managed.address)
    tiers.append(tiers[-1] | {"name": "few", "slow": True})
    engine.took(state(managed, tiers=tiers, traffic={"faults": 2}, switches={"freeze": True}), 0.0)
    shown = drawn(engine)
    assert "near ok  far left alone (OPEN)  odd not read by a rank  old ok 1.9 GiB/s  few slow 1.9 GiB/s" in shown
    assert "2 faults  freeze" in shown


def test_names_from_clients_are_escaped(managed: Managed) -> None:
    """A request's id may be any text. The view shows it as text: control sequences and markup have no effect."""
    request = managed.world.request("a", 4)
    request.request_id = "x\x1b[2J[red]y\n"
    managed.world.admit(request)
    shown = drawn(looked(managed))
    assert "\x1b" not in shown
    assert "x\\x1b[2J[red]y\\n" in shown


def test_texts_of_an_engine_are_escaped(managed: Managed) -> None:
    """The listener at a port may not be an engine, so its texts are escaped and its numbers cannot crash the view."""
    odd, engine = "\x1b]0;mine\x07", seen.SeenEngine(managed.address)
    managed.save("a", 2)
    request = {**RequestHolds(
        request=odd, lived_s=1e300, tokens=1, answer_tokens=0, preemptions=0, state=odd, saving=odd, saved_tokens=0,
        chunks_held=0, waits_for_tiers=True,
    ).model_dump()}  # fmt: skip
    tier = {"name": odd, "kind": odd, "breaker": odd, "left_by_ranks": True}
    quick = {"name": odd, "kind": odd, "breaker": "CLOSED", "left_by_ranks": False, "read_bytes_per_s": 1e300}
    engine.took(state(managed, engine=odd, up_s=1e300, tiers=[tier, quick], requests_shown=[request]), 0.0)
    held = {"salt_digest": odd, "adapter": odd, "adapter_digest": odd, "chunks": 1, "bytes": 1, "held": 0}
    holders = {"chunks": 1, "tenants": 2, "tenants_shown": [{**held, "idle_s": 1e300}], "chunks_unnamed": 0}
    engine.holders = Holders.model_validate({**holders, "holders": 0, "holders_shown": []})
    shown = drawn(engine)
    assert {"\x1b", "\x07"}.isdisjoint(shown)
    assert shown.count(r"\x1b]0;mine\x07") >= 5
    with pytest.raises(ValueError, match="finite"):
        state(managed, up_s=float("nan"))


def test_silent_engine_is_named(managed: Managed, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """The view names the silent engine and shows the other engines. The exit status reports the failure."""
    at = [
        "--token-file",
        str(folder / "token"),
        "--once",
        "--at",
        f"unix:{folder}/none.sock",
        "--at",
        str(managed.address),
    ]
    assert cli.main(["top", *at]) == 1
    shown = capsys.readouterr().out
    assert f"unix:{folder}/none.sock" in shown.replace("\n", "")
    assert "● e1" in shown
    assert "refused (401)" in drawn(looked(managed, TOKEN[1:]))


def test_an_engine_of_another_version_is_named(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine has another version, its answer is not understood. Only the version of that engine is shown."""
    monkeypatch.setattr(seen, "send_request", lambda *_, **__: {"kvpipe": "9"})
    assert "another version" in drawn(looked(managed))


def test_every_engine_of_a_folder_is_shown(
    managed: Managed, second: Managed, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """`{engine}` stands for every engine in the folder. An engine whose socket was removed is not shown any more."""
    pattern = Address.parse(f"unix:{folder}/{{engine}}.sock")
    (folder / "two.sock").symlink_to(second.address.path)
    watch = seen.EngineList([pattern], TOKEN)
    anyio.run(looked_at, watch)
    assert [engine.last is not None for engine in watch.engines] == [True, True]
    (folder / "two.sock").unlink()
    anyio.run(looked_at, watch)
    assert [engine.address for engine in watch.engines] == [managed.address]
    none = ["--once", "--token-file", str(folder / "token"), "--at", f"unix:{folder}/none/{{engine}}.sock"]
    assert cli.main(["top", *none]) == 1
    assert "no engine listens there" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--interval", "0"], ["--interval", "nan"], ["--interval", "x"]])
def test_wrong_argument_is_named(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the wrong argument."""
    with pytest.raises(SystemExit):
        cli.main(["top", *given])
    assert "--interval" in capsys.readouterr().err


def test_missing_address_is_reported_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the remedy."""
    assert cli.main(["top", "--once"]) == 2
    assert "give --at, or set KVPIPE_MANAGE" in capsys.readouterr().err


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_view_is_redrawn_until_it_is_interrupted(managed: Managed, folder: Path, term: str) -> None:
    """The view is redrawn until it is interrupted. After the interrupt, the terminal is as before."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "kvpipe", "top", "--at", str(managed.address), "--interval", "0.2"]
    with (
        interrupts_enabled(),
        subprocess.Popen(
            [*command, "--token-file", str(folder / "token")],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES"}} | {"TERM": term},
        ) as process,
    ):
        os.close(slave)
        seen, until_s = b"", time.monotonic() + WAIT_S
        while seen.count(b"vLLM lacked") < 3 and time.monotonic() < until_s:
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s and select.select([master], [], [], WAIT_S)[0]:
            try:
                more = os.read(master, 65536)
            except OSError:  # the other end of the terminal is closed
                break
            seen += more
        try:
            assert process.wait(WAIT_S) == top.INTERRUPTED
        finally:
            process.kill()
    os.close(master)
    assert seen.count(b"vLLM lacked") >= 3
    if term == "xterm":
        assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is shown again
        assert seen.endswith(b"\x1b[?1049l")  # the earlier content of the terminal returns
    assert b"Traceback" not in seen


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" + "0" * 5000, str(1 << 63), "1e400", "-Infinity"])
def test_an_engine_with_an_impossible_number_is_unreadable(number: str, managed: Managed, tmp_path: Path) -> None:
    """An impossible number in any field makes the answer unreadable. The other engines are shown."""
    body = json.dumps(managed.good("GET", "/v1/state") | {"step": 123454321}).replace("123454321", number).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with answering(tmp_path / "x.sock", head + body):
        odd = seen.SeenEngine(Address.parse(f"unix:{tmp_path}/x.sock"))
        anyio.run(odd.look, TOKEN)
    shown = drawn(odd, looked(managed))
    assert "unreadable" in shown
    assert "● e1" in shown


@pytest.mark.parametrize("number", [(1 << 63) - 1, -(1 << 63) + 1])
def test_the_largest_numbers_are_drawn(number: int, managed: Managed) -> None:
    """The screen shows the largest accepted number in every field."""
    whole, engine = managed.good("GET", "/v1/state"), looked(managed)
    changes: list[dict[str, Any]] = [{key: number} for key, value in whole.items() if type(value) in {int, float}]
    changes += [{"pool": {key: number}} for key, value in whole["pool"].items() if type(value) in {int, float}]
    for changed in changes:
        engine.took(EngineState.model_validate(merged(whole, changed)), time.monotonic())
        assert "e1" in drawn(engine)


def merged(whole: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with some of its values changed."""
    return whole | {key: whole[key] | one if isinstance(one, dict) else one for key, one in changed.items()}
