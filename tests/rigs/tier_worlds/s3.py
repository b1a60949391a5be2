"""The worlds of the S3 tier on a real server: the first reads a value in one request, the second in ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvpipe.testing.tier_conformance import Limit, TierWorld
from kvpipe.testing.waiting import PATIENT
from kvpipe.tiers.s3.spec import S3Spec
from tests.rigs.servers.s3 import BUCKET, S3Server, fresh_prefix, shared

KEYS = {"TESTS_S3_ACCESS": "access", "TESTS_S3_SECRET": "hush-hush"}

LIMITS: Final[frozenset[Limit]] = frozenset({"unbounded", "age"})
"""A bucket's rule removes objects by the time since they were written. Objects are written only once."""


def spec_of(server: S3Server, **keys: Any) -> S3Spec:
    """Return the specification of an empty prefix on `server`, with the values of `keys` changed."""
    os.environ |= KEYS
    message = {
        "url": f"s3://{BUCKET}/{fresh_prefix()}",
        "endpoint": server.endpoint,
        "allow_http": True,
        "region": "us-east-1",
        "access_key_env": "TESTS_S3_ACCESS",
        "secret_key_env": "TESTS_S3_SECRET",
        "timeout_ms_max": 10_000,
    }
    return S3Spec.model_validate(message | keys)


@contextmanager
def s3_world(_folder: Path) -> Iterator[TierWorld]:
    """Set up an empty prefix. Values of more than 1 MiB are read in ranges."""
    server = shared()
    spec = spec_of(server, read_bytes=1 << 20, **PATIENT)
    yield TierWorld(lambda: spec.make("s3"), spec, LIMITS, broken=server.without_bucket)


WORLDS = {"s3": s3_world}
