"""The engine's side of a client's process: who has its lanes, and when their memory is gone."""

from __future__ import annotations

import io
import os
import socket

import anyio
import pytest

from kvpipe.testing.servers.s3 import shared
from kvpipe.testing.tier_conformance import run
from kvpipe.testing.tier_worlds.s3 import spec_of
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.process import ClientChannel, Pool


def test_a_lane_whose_process_is_gone_has_no_memory() -> None:
    """A lane that is still lent when its process is ended maps no memory: the descriptor is somebody else's by now."""

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


def test_waiting_for_idle_lanes_can_be_cancelled() -> None:
    """Who gives up waiting until nobody has a lane keeps none: later all are there."""

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
