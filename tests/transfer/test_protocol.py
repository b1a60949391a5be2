"""Every transfer engine keeps the protocol: on the CPU, on a simulated CUDA device and on a real device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_conformance import TABLE, TransferConformance
from kvpipe.testing.transfer_worlds import KINDS, LAYERS, World, job_rows, make_job, world
from kvpipe.transfer.base import Direction


@pytest.mark.parametrize("kind", KINDS)
class TestOurEngines(TransferConformance):
    """The conformance suite for the CPU engine, and for the CUDA engine with each mover."""

    def world(self, kind: str, **options: Any) -> AbstractContextManager[World]:
        """Set up one of kvpipe's engines."""
        return world(kind, **options)

    def test_a_bad_copy_is_logged(self, kind: str) -> None:
        """A failed copy is logged once, as an error."""
        with capture_logs() as logs, world(kind) as w:
            w.submit(Direction.SAVE, LAYERS + 1, [make_job(1, job_rows(1, TABLE))])
            w.drain()
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["copy_failed"]
