"""Tests of the adapters that a rank holds, without an engine."""

from __future__ import annotations

import pytest

from kvpipe.protocol.messages import BROKEN, Claim
from kvpipe.trace.log import Counters
from kvpipe.worker.adapters import HeldAdapters, Loaded
from tests.rigs.pipeline_rig import job, plan


@pytest.mark.parametrize(("digests", "stands"), [((b"a", b"b", b"a"), False), ((b"a", b"a", b"a"), True)])
def test_job_fails_when_its_adapter_was_another_since_the_claimed_step(
    digests: tuple[bytes, ...], stands: bool
) -> None:
    """The rank held the claimed bytes at the claimed step, and holds them now.

    If it held other bytes in between, these may have computed the KV.
    """
    held = HeldAdapters(Counters())
    held.now = lambda: {7: b"a"}
    for step, digest in enumerate(digests):
        held.step = step
        held.loaded(Loaded(7, "name", "path", digest))
    asked = plan(job(1))._replace(step=9, claims=(Claim(1, 7, b"a", 2),))
    (one,) = held.checked(asked).jobs
    assert (bool((one.table()[:, 1] == BROKEN).all()), held.changes > len(digests)) == (not stands, not stands)


def test_adapters_are_not_held_after_their_bytes_are_gone() -> None:
    """After the bytes of all adapters are gone, the engine still lists the adapters.

    The rank holds an adapter again only when it is loaded again.
    """
    held = HeldAdapters(Counters())
    held.now = lambda: {7: b"a", 8: b"b"}
    for number, digest in held.now().items():
        held.loaded(Loaded(number, f"name {number}", "path", digest))
    assert held.news() == {7: b"a", 8: b"b"}
    held.lose()
    asked = plan(job(1))._replace(claims=(Claim(1, 7, b"a", 0),))
    assert (held.checked(asked).jobs[0].table()[:, 1] == BROKEN).all()
    assert held.news() == {7: b"", 8: b""}
    held.loaded(Loaded(7, "name 7", "path", b"a"))
    assert held.checked(asked) == asked
    assert held.news() == {7: b"a"}
