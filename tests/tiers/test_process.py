"""Tests of the engine's side of a client's process: how lanes are used, and when their memory is released."""

from __future__ import annotations

import asyncio
import io
import os
import socket

import anyio
import msgspec
import pytest

from kvpipe.testing.tier_conformance import run
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.process import ClientChannel, Pool
from kvpipe.tiers.s3 import child
from tests.rigs.servers.s3 import shared
from tests.rigs.tier_worlds.s3 import spec_of


def test_lane_of_an_ended_process_maps_no_memory() -> None:
    """A lane in use when its process ends maps no memory, because its descriptor may now belong to another file."""

    async def play() -> None:
        tier = spec_of(shared()).make("s3")
        await tier.open()
        client, tier._child = tier._child, None
        assert client is not None
        async with client.pools["read"].lane(WAIT_S) as lane:
            await client.kill()
            with pytest.raises(ConnectionResetError):
                lane.room(4096)

    run(play)


def test_answer_that_cannot_be_sent_fails_its_question() -> None:
    """If the client's answer is longer than a message, the client reports this and continues."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def answers() -> str:
        return "x" * (64 << 20)

    async def play() -> None:
        task = asyncio.create_task(answers())
        await task
        child._reply(theirs, task)

    with ours, theirs:
        ours.settimeout(WAIT_S)
        asyncio.run(play())
        received = msgspec.msgpack.decode(ours.recv(child.MESSAGE_BYTES_MAX))
        assert received == ["the client's answer cannot be sent", None]


def test_waiting_for_idle_lanes_can_be_cancelled() -> None:
    """A caller that is cancelled while it waits until all lanes are idle keeps no lane."""

    async def play() -> None:
        memory = io.FileIO(os.memfd_create("tests"), "r+")
        pairs = [socket.socketpair() for _ in range(2)]
        pool = Pool([ClientChannel(one, memory, range(4096), cancels=False) for one, _ in pairs])
        async with pool.lane(WAIT_S):
            with anyio.move_on_after(0.05):
                await pool.idle()
        with anyio.fail_after(WAIT_S):
            await pool.idle()
        memory.close()
        for one in (end for pair in pairs for end in pair):
            one.close()

    run(play)
