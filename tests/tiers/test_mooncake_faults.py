"""Every failure of a Mooncake cluster or its client costs only misses, within bounded time."""

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
from kvpipe.testing.tier_conformance.worlds import run, tried
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.base import Put, Read, Tier, TierError, TierFullError, Written
from kvpipe.tiers.mooncake import child
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from kvpipe.tiers.mooncake.tier import MOVERS, MooncakeTier
from tests.rigs.servers import signals
from tests.rigs.servers.mooncake import Master, master, node
from tests.rigs.servers.sockets import free_port
from tests.rigs.tier_worlds.mooncake import cluster, spec_of
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
    """Without a master, or with a stopped master, `open` fails soon. When a master answers, `open` succeeds."""

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
    """Without the master every call fails soon.

    With a new master at the same address calls work again, and old values are misses.
    """

    async def play(of: Master) -> None:
        async with client(of, **QUICK, **LENDS) as tier:
            await stored(tier, *(put(i, 64 * KIB) for i in range(4)))
            of.kill()
            await every_call_fails(tier, 4)
            of.start()
            await soon(partial(tier.exists, [some_key(0)]), [False])
            fresh = itertools.count(200)  # new keys, because a write that timed out may still have stored its value
            await soon(lambda: tier.write([put(next(fresh), 64 * KIB)]), [Written.STORED])
            last = next(fresh) - 1
            assert await tried(tier.read, [get(last, 64 * KIB), get(1, 64 * KIB)]) == [Read.HIT, Read.MISS]
            await tried(tier.health)

    with master() as of:
        run(play, of)


def test_a_stopped_master_is_waited_for_within_bounds() -> None:
    """While the master is stopped, every call fails soon, `close` too. When it continues, the tier works again."""

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
            # new keys, because a value whose write timed out may stay half written for a while
            fresh = itertools.count(200)
            await soon(lambda: tier.write([put(next(fresh), 64 * KIB)]), [Written.STORED])
            last = next(fresh) - 1
            wanted = get(last, 64 * KIB)
            assert await tried(tier.read, [wanted]) == [Read.HIT]
            assert data(wanted.into) == content(last, 64 * KIB)

    with master("--client_ttl=30") as of:
        run(play, of)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_owner_costs_misses(number: signal.Signals) -> None:
    """Values of a killed or stopped owner are errors or misses, and soon only misses.

    Other owners still accept writes.
    """

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
    """In a full memory a write raises TierFullError, and values can be read.

    When leases have ended, the cluster evicts values to make room.
    """
    counts: list[int] = []

    async def play(of: Master) -> None:
        async with client(of) as tier:
            count = await _filled(tier)
            if count and await tier.read([get(count - 1, MIB)]) == [Read.HIT]:
                counts.append(count)
                await soon(partial(_stored_and_read, tier, 100), [Read.HIT])

    # on a slow machine, short leases end before the cluster is full and was read
    for lease_ms in (4000, 16_000, 64_000):
        with master(f"--default_kv_lease_ttl={lease_ms}") as of, node(of.address, 16 * MIB):
            run(play, of)
        if counts:
            break
    assert counts
    assert counts[0] > 8


async def _stored_and_read(tier: Tier, i: int) -> list[Read]:
    """Write a value and read it. A full cluster may evict a value before a read has leased it, which is a miss."""
    await tier.write([put(i, MIB)])
    wanted = get(i, MIB)
    found = await tier.read([wanted])
    assert found == [Read.MISS] or data(wanted.into) == content(i, MIB)
    return list(found)


async def _filled(tier: Tier) -> int:
    """Write values until there is no room, and read each value to lease it.

    Return the number of stored values, or 0.
    """
    for i in range(40):
        try:
            await tier.write([put(i, MIB)])
        except TierFullError as error:
            assert "no room" in str(error)  # noqa: PT017  (after how many is the question)
            return i
        await tier.read([get(i, MIB)])
    return 0


def test_a_value_without_room_on_the_way_is_refused() -> None:
    """A value that is longer than a lane's memory is refused, and the message names the key to change.

    The next value is written.
    """

    async def play() -> None:
        async with client(cluster(), buffer_bytes="4MiB") as tier:
            await fails(partial(tier.write, [put(1, MIB + 4096)]), "raise buffer_bytes")
            await fails(partial(tier.read, [get(1, MIB + 4096)]), "raise buffer_bytes")
            await tier.delete([some_key(2)])
            assert await tier.write([put(2, MIB)]) == [Written.STORED]

    run(play)


def test_a_key_asked_twice_is_read_twice() -> None:
    """A read of one key into several buffers fills each buffer.

    Mooncake's own client would fill one and report all as read.
    """

    async def play() -> None:
        async with client(cluster()) as tier:
            await tier.delete([some_key(1)])
            await tier.write([put(1, 64 * KIB)])
            gets = [get(1, 64 * KIB) for _ in range(5)]
            assert await tier.read(gets) == [Read.HIT] * 5
            assert {data(one.into) for one in gets} == {content(1, 64 * KIB)}

    run(play)


def test_late_answer_is_not_taken_for_the_next_call() -> None:
    """After a call is cancelled, its lane stays in use until the client's answer arrives.

    So no later call on this lane gets the answer.
    """

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


def test_killed_client_is_started_again() -> None:
    """When the client's process dies, all calls fail soon. A probe of the tier's health starts the process again."""

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
    """A killed client that cannot be replaced at once is replaced as soon as the master is back."""

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
    """An answer that is too long is reported as a failure.

    If a lane cannot continue, the client's process ends. A probe then starts the process again.
    """

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
    """A fork of the engine exits normally.

    When the engine is killed, the client ends, even if a fork is still running.
    """
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
    """The master is stopped. A read and a write that are cancelled then end within the limit of one call."""

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
