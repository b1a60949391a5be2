"""Forks of a process that holds an engine with tiers. The child neither hangs nor uses the parent's resources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.waiting import PATIENT, WAIT_S
from tests.engine.common import assert_legal
from tests.rigs.servers.redis import serving
from tests.rigs.servers.s3 import shared
from tests.rigs.servers.sockets import LOCAL
from tests.rigs.tier_worlds.s3 import spec_of

pytestmark = pytest.mark.engine
KINDS = ("disk", "redis", "s3")


@contextmanager
def _tier(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "disk":
        yield {"kind": "disk", "path": str(folder), "bytes_max": "1GiB", **PATIENT}
    elif kind == "s3":
        yield spec_of(shared(), **PATIENT).model_dump(mode="json", exclude_none=True)
    else:
        with serving("redis") as server:
            yield {"kind": "redis", "host": LOCAL, "port": server.port, **PATIENT}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the message of the failure of each kind of tier, or "" if the kind passed.

    All kinds share one process, because a start takes seconds.
    """
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("forked")
        trace = folder / "trace.jsonl"
        tiers = [json.dumps(stack.enter_context(_tier(kind, folder / "kv"))) for kind in KINDS]
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.forking", *tiers],
            env=os.environ | {"KVPIPE_TRACE_FILE": str(trace)},
            capture_output=True, text=True, timeout=5 * WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert_legal(trace)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("kind", KINDS)
def test_child_of_a_fork_leaves_the_engine_running(kind: str, forked: dict[str, str]) -> None:
    """A child may collect garbage, shut the connector down, or be started by multiprocessing.

    The child ends without an error.

    The engine continues.
    """
    assert forked[kind] == ""
