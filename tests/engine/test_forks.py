"""A fork of a process that holds an engine with tiers: the child neither hangs nor touches what is the parent's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.servers.redis import serving
from kvpipe.testing.servers.s3 import shared
from kvpipe.testing.servers.sockets import LOCAL
from kvpipe.testing.tier_worlds.s3 import spec_of
from kvpipe.testing.waiting import PATIENT, WAIT_S

pytestmark = pytest.mark.engine


@contextmanager
def _tier(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "disk":
        yield {"kind": "disk", "path": str(folder), "bytes_max": "1GiB", **PATIENT}
    elif kind == "s3":
        yield spec_of(shared(), **PATIENT).model_dump(mode="json", exclude_none=True)
    else:
        with serving("redis") as server:
            yield {"kind": "redis", "host": LOCAL, "port": server.port, **PATIENT}


@pytest.mark.parametrize("kind", ["disk", "redis", "s3"])
def test_user_code_forks(kind: str, tmp_path: Path) -> None:
    """Children that collect garbage, shut the connector down, or are multiprocessing's end well; the engine goes on."""
    with _tier(kind, tmp_path) as tier:
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.forking", json.dumps(tier)],
            capture_output=True, text=True, timeout=5 * WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
