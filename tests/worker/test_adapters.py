"""The adapters that a rank holds, without an engine."""

from __future__ import annotations

import pytest

from kvpipe.messages import BROKEN, Claim
from kvpipe.testing.pipeline_rig import job, plan
from kvpipe.trace.log import Counters
from kvpipe.worker.adapters import HeldAdapters, Loaded


@pytest.mark.parametrize(("digests", "stands"), [((b"a", b"b", b"a"), False), ((b"a", b"a", b"a"), True)])
def test_job_fails_when_its_adapter_was_another_since_the_claimed_step(
    digests: tuple[bytes, ...], stands: bool
) -> None:
    """The rank holds the claimed bytes in both cases, but KV of a step in between may be that of others."""
    held = HeldAdapters(Counters())
    held.now = lambda: {7: b"a"}
    for step, digest in enumerate(digests):
        held.step = step
        held.loaded(Loaded(7, "name", "path", digest))
    asked = plan(job(1))._replace(step=9, claims=(Claim(1, 7, b"a", 2),))
    (one,) = held.checked(asked).jobs
    assert (bool((one.table()[:, 1] == BROKEN).all()), held.changes > len(digests)) == (not stands, not stands)
