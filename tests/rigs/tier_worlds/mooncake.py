"""The world of the Mooncake tier: a real master, and a node that lends memory."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.request import urlopen

import anyio

from kvpipe.testing.tier_conformance import Limit, TierWorld
from kvpipe.testing.waiting import PATIENT, WAIT_S
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from tests.rigs.servers.mooncake import Master, master, node

LIMITS: Final[frozenset[Limit]] = frozenset({"unbounded", "age", "unbroken"})
"""Only the master evicts values and knows their ages. `tests/tiers/test_mooncake_faults.py` stops the master."""
SEGMENT_BYTES = 512 << 20


@functools.cache
def cluster() -> Master:
    """Start one cluster for all tests of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    made = stack.enter_context(master())
    stack.enter_context(node(made.address, SEGMENT_BYTES))
    return made


def spec_of(of: Master, **given: object) -> MooncakeSpec:
    """Return the specification of a client, which lends no memory by default."""
    keys = {"master": of.address, "metrics": of.metrics, "segment_bytes": 0, "buffer_bytes": "128MiB", **PATIENT}
    return MooncakeSpec.model_validate(keys | given)


async def emptied(spec: MooncakeSpec) -> None:
    """Drop every value."""
    tier = spec.make("emptied")
    await tier.open()
    await tier.delete([entry.key async for entry in tier.scan()])
    await tier.close()


@contextmanager
def mooncake_world(_folder: Path) -> Iterator[TierWorld]:
    """Set up an empty store."""
    spec = spec_of(cluster())
    with urlopen(f"http://{spec.metrics}/get_all_keys", timeout=WAIT_S) as answer:
        if answer.read().strip():
            anyio.run(emptied, spec)
    yield TierWorld(lambda: spec.make("mooncake"), spec, LIMITS)


WORLDS = {"mooncake": mooncake_world}
