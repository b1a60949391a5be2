"""The worlds of the S3 tier: a real server, once with values in one request, once with values read in ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpipe.testing.servers.s3 import BUCKET, S3Server, fresh_prefix, shared
from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.testing.waiting import PATIENT
from kvpipe.tiers.s3.spec import S3Spec

KEYS = {"TESTS_S3_ACCESS": "access", "TESTS_S3_SECRET": "hush-hush"}


def spec_of(server: S3Server, **keys: Any) -> S3Spec:
    """Return the specification of an empty place on `server`, changed by `keys`."""
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
    """Set up an empty prefix; values of more than 1 MiB are read in ranges."""
    spec = spec_of(shared(), read_bytes=1 << 20, **PATIENT)
    yield TierWorld(lambda: spec.make("s3"), spec)


WORLDS = {"s3": s3_world}
