"""Every way in which a Mooncake cluster, or its client, fails: it costs misses, soon, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from kvpipe.testing.buffers import content, data, get, put, some_key, value
from kvpipe.testing.servers import signals
from kvpipe.testing.servers.mooncake import Master, master, node
from kvpipe.testing.servers.sockets import free_port
from kvpipe.testing.tier_conformance import run, tried
from kvpipe.testing.tier_worlds.mooncake import cluster, spec_of
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.base import Put, Read, Tier, TierError, TierFullError, Written
from kvpipe.tiers.mooncake import child
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from kvpipe.tiers.mooncake.tier import MOVERS, MooncakeTier
from tests.tiers.mooncake_clients import (
    ALLOWED_S,
    KIB,
    LENDS,
    MIB,
    QUICK,
    client,
    every_call_fails,
    fails,
    soon,
    stored,
)


def test_without_a_master_opening_fails_and_later_succeeds() -> None:
    """With nobody at the master's address, or a stopped one, open fails soon; once it answers, open succeeds."""

    async def play() -> None:
        nobody = MooncakeSpec.model_validate({"master": f"127.0.0.1:{free_port()}", **QUICK}).make("mooncake")
        await fails(nobody.open, "cannot be reached")
        with master() as of:
            of.send(signal.SIGSTOP)
            tier = spec_of(of, **QUICK).make("mooncake")
            await fails(tier.open, "setup of the client failed")
            of.send(signal.SIGCONT)
            await tried(tier.open)
            await tried(tier.health)
            await tier.close()

    run(play)


def test_a_killed_master_costs_misses_and_is_found_again() -> None:
    """While the master is gone every call fails soon; a new one at its address is found, and old values are misses."""

    async def play(of: Master) -> None:
        async with client(of, **QUICK, **LENDS) as tier:
            await stored(tier, *(put(i, 64 * KIB) for i in range(4)))
            of.kill()
            await every_call_fails(tier, 4)
            of.start()
            await soon(partial(tier.exists, [some_key(0)]), [False])
            fresh = itertools.count(200)  # a write that was given up may have been made all the same
            await soon(lambda: tier.write([put(next(fresh), 64 * KIB)]), [Written.STORED])
            last = next(fresh) - 1
            assert await tried(tier.read, [get(last, 64 * KIB), get(1, 64 * KIB)]) == [Read.HIT, Read.MISS]
            await tried(tier.health)

    with master() as of:
        run(play, of)


def test_a_stopped_master_is_waited_for_within_bounds() -> None:
    """While the master is stopped every call fails soon, also a close; when it goes on, so does the tier."""

    async def play(of: Master) -> None:
        async with client(of, **QUICK, **LENDS) as tier, client(of, **QUICK, **LENDS) as other:
            await stored(tier, put(1, 64 * KIB))
            of.send(signal.SIGSTOP)
            try:
                await every_call_fails(tier, 1)
                begin = time.monotonic()
                await other.close()
                assert time.monotonic() - begin < ALLOWED_S
            finally:
                of.send(signal.SIGCONT)
            fresh = itertools.count(200)  # a key whose write was given up may be found half written for a while
            await soon(lambda: tier.write([put(next(fresh), 64 * KIB)]), [Written.STORED])
            last = next(fresh) - 1
            wanted = get(last, 64 * KIB)
            assert await tried(tier.read, [wanted]) == [Read.HIT]
            assert data(wanted.into) == content(last, 64 * KIB)

    with master("--client_ttl=30") as of:
        run(play, of)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_owner_costs_misses(number: signal.Signals) -> None:
    """Values of an owner that is killed or stopped are errors or misses, soon only misses; writes go on elsewhere."""

    async def play(of: Master, owner: subprocess.Popen[str]) -> None:
        async with client(of, **QUICK) as tier:
            await stored(tier, *(put(i, 256 * KIB) for i in range(2)))
            signals.send(owner, number)
            for i in range(2):
                with contextlib.suppress(TierError):
                    assert await tier.read([get(i, 256 * KIB)]) == [Read.MISS]
            await soon(partial(tier.read, [get(i, 256 * KIB) for i in range(2)]), [Read.MISS] * 2)
            with node(of.address, 64 * MIB):
                await stored(tier, put(0, MIB))
                assert await tried(tier.read, [get(0, MIB)]) == [Read.HIT]

    with master("--client_ttl=4") as of, node(of.address, 64 * MIB) as owner:
        run(play, of, owner)


def test_a_full_cluster_reports_it_and_makes_room() -> None:
    """With all memory in use a write raises TierFullError and reads go on; room is made when leases have ended."""
    counts: list[int] = []

    async def play(of: Master) -> None:
        async with client(of) as tier:
            counts.append(await _filled(tier))
            if not counts[-1]:
                return
            assert await tier.read([get(counts[-1] - 1, MIB)]) == [Read.HIT]
            await soon(partial(tier.write, [put(100, MIB)]), [Written.STORED])
            wanted = get(100, MIB)
            assert await tier.read([wanted]) == [Read.HIT]
            assert data(wanted.into) == content(100, MIB)

    for lease_ms in (4000, 16_000, 64_000):  # a slow machine may not have filled it before the first leases end
        with master(f"--default_kv_lease_ttl={lease_ms}") as of, node(of.address, 16 * MIB):
            run(play, of)
        if counts[-1]:
            break
    assert counts[-1] > 8


async def _filled(tier: Tier) -> int:
    """Write, and read at once, which is a lease, until there is no room; return how many were stored, or 0."""
    for i in range(40):
        try:
            await tier.write([put(i, MIB)])
        except TierFullError as error:
            assert "no room" in str(error)  # noqa: PT017  (after how many is the question)
            return i
        await tier.read([get(i, MIB)])
    return 0


def test_a_value_without_room_on_the_way_is_refused() -> None:
    """A value that is longer than a lane's memory is refused with the key to change, and the next one is written."""

    async def play() -> None:
        async with client(cluster(), buffer_bytes="4MiB") as tier:
            await fails(partial(tier.write, [put(1, MIB + 4096)]), "raise buffer_bytes")
            await fails(partial(tier.read, [get(1, MIB + 4096)]), "raise buffer_bytes")
            await tier.delete([some_key(2)])
            assert await tier.write([put(2, MIB)]) == [Written.STORED]

    run(play)


def test_a_key_asked_twice_is_read_twice() -> None:
    """One read of the same key into several buffers fills each; Mooncake's own client fills one and reports all."""

    async def play() -> None:
        async with client(cluster()) as tier:
            await tier.delete([some_key(1)])
            await tier.write([put(1, 64 * KIB)])
            gets = [get(1, 64 * KIB) for _ in range(5)]
            assert await tier.read(gets) == [Read.HIT] * 5
            assert {data(one.into) for one in gets} == {content(1, 64 * KIB)}

    run(play)


def test_a_late_answer_is_not_the_next_ones() -> None:
    """A call that was given up leaves its lane to the client until the answer has come: no later call gets it."""

    async def play(of: Master) -> None:
        async with client(of, **QUICK) as tier:
            await stored(tier, *(Put(some_key(i), value(i, MIB)) for i in range(4)))
            process = tier._child
            assert process is not None
            signals.send(process._process, signal.SIGSTOP)
            filling = b"\xa5" * MIB
            given_up = [get(0, MIB) for _ in range(MOVERS)]
            try:
                for one in given_up:
                    await fails(partial(tier.read, [one]), "no answer within")
                    one.into[0][:] = filling
            finally:
                process._process.send_signal(signal.SIGCONT)
            for i in (3, 2, 1):
                wanted = get(i, MIB)
                assert await tried(tier.read, [wanted]) == [Read.HIT]
                assert data(wanted.into) == content(i, MIB)
            assert all(one.into[0] == filling for one in given_up)

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


# ---- the client's process -----------------------------------------------------------------------------------------


def test_a_killed_client_is_started_anew() -> None:
    """When the client's process dies, calls under way and later ones fail soon; a probe of health starts it anew."""

    async def play() -> None:
        async with client(cluster()) as tier:
            await tier.delete([some_key(1)])
            await tier.write([put(1, MIB)])
            assert tier._child is not None
            async with anyio.create_task_group() as group:
                group.start_soon(fails, partial(_reads, tier, 1000))
                await anyio.sleep(0.05)
                tier._child._process.kill()
            await fails(partial(tier.exists, [some_key(1)]), "process is gone")
            await tier.health()
            assert await tier.read([get(1, MIB)]) == [Read.HIT]

    run(play)


def test_a_client_that_is_killed_while_the_master_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cannot be replaced at once is, as soon as the master is back."""

    async def away(_: MooncakeTier) -> tuple[str, int]:
        raise TierError("away")

    async def play() -> None:
        async with client(cluster()) as tier:
            assert tier._child is not None
            tier._child._process.kill()
            with monkeypatch.context() as patch:
                patch.setattr(MooncakeTier, "_reached", away)
                for _ in range(2):
                    await fails(tier.health, "away")
            await tier.health()
            assert await tier.exists([some_key(404)]) == [False]

    run(play)


@pytest.mark.parametrize(
    ("answer", "noted", "ends"),
    [(bytes(16 << 20), ["the client's answer cannot be sent", None], []), (object(), None, [1])],
    ids=["too long", "no message"],
)
def test_a_lane_answers_or_the_client_ends(
    monkeypatch: pytest.MonkeyPatch, answer: object, noted: object, ends: list[int]
) -> None:
    """An answer that is too long is a failure; a lane that cannot go on ends the client, so that it is started anew."""

    class Answering:
        def answer(self, _lane: int, _question: list[Any]) -> object:
            return answer

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.send(msgspec.msgpack.encode(["exists", []]))
        here.shutdown(socket.SHUT_WR)
        child.serve(cast("child.Worker", Answering()), 0, there)
        assert ended == ends
        if noted is not None:
            assert msgspec.msgpack.decode(here.recv(1 << 20)) == noted


async def _reads(tier: Tier, times: int) -> None:
    for _ in range(times):
        await tier.read([get(1, MIB)])


def _process_has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_the_engine_forks_and_dies_without_harm() -> None:
    """A fork of the engine ends as it should, and when the engine is killed the client ends, though a fork lives on."""
    script = textwrap.dedent(
        """
        import os, signal, sys, time
        import anyio
        from kvpipe.tiers.mooncake.spec import MooncakeSpec
        from kvpipe.tiers.mooncake.tier import MOVERS, MooncakeTier

        async def play():
            keys = {"master": sys.argv[1], "segment_bytes": "16MiB", "timeout_ms_max": 120_000}
            tier = MooncakeSpec.model_validate(keys).make("mooncake")
            await tier.open()
            if os.fork() == 0:
                sys.exit(0)
            _, status = os.wait()
            fork = os.fork()
            if fork == 0:
                os.closerange(0, 3)
                time.sleep(600)
            print("mooncake.store" in sys.modules, status, tier._child._process.pid, fork, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(play)
        """
    )
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    with master() as of:
        ran = subprocess.run(
            [sys.executable, "-c", script, of.address],
            capture_output=True, text=True, check=False, env=env, timeout=WAIT_S,
        )  # fmt: skip
        loaded, status, pid, fork = ran.stdout.split()
        try:
            assert (loaded, status) == ("False", "0"), ran.stderr
            assert eventually(lambda: _process_has_ended(int(pid)))
        finally:
            os.kill(int(fork), signal.SIGKILL)


def test_a_cancelled_call_waits_no_longer_than_its_bound() -> None:
    """A read and a write that are cancelled while the master is stopped end within the bound of one call."""

    async def play(of: Master) -> None:
        async with client(of, **QUICK) as tier:
            calls: list[Any] = [partial(tier.read, [get(1, MIB)]), partial(tier.write, [put(1, MIB)])]
            of.send(signal.SIGSTOP)
            try:
                for call in calls:
                    begin = time.monotonic()
                    with anyio.move_on_after(0.1), contextlib.suppress(TierError):
                        await call()
                    assert time.monotonic() - begin < ALLOWED_S
            finally:
                of.send(signal.SIGCONT)
            await stored(tier, put(2, MIB))

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)
