"""The memory of the process does not grow with the number of requests. A short form of `make soak`, and its report."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest

from kvpipe.connectors.vllm.trial import soak
from kvpipe.connectors.vllm.trial.soak import MemorySample, memory_verdict, player, plot, sampled_rows, slope
from kvpipe.scheduler.records import Tracked

REQUESTS = 160
THREADS = 8
"""The number of threads of the disk tier. Threads start and end during the test, and hold files open."""
OBJECTS_PER_REQUEST_MAX = 0.25
"""The limit on the growth in objects per request.

The limit is above 0, because the number of chunks on a full disk varies, and each chunk has several marks.
"""
BLOCKS_PER_REQUEST_MAX = 40.0
"""The limit on the growth in Python's memory blocks per request.

About 12 of these blocks are keys of evicted chunks, which kvpipe remembers.
"""


def kinds() -> Counter[str]:
    """Return the number of objects of each of kvpipe's classes."""
    gc.collect()
    names = ((type(one).__module__, type(one).__qualname__) for one in gc.get_objects())
    # some classes have no string as `__module__`
    return Counter(name for module, name in names if str(module).startswith("kvpipe"))


def test_nothing_grows_with_requests() -> None:
    """With a full pool and disk, more requests leave the number of held objects unchanged, and no file stays open."""
    with player({"pool_bytes_max": "1MiB"}, disk_bytes_max="1MiB") as one:
        one.play(REQUESTS)
        before, objects = one.sample(), kinds()
        one.play(2 * REQUESTS)
        after, more = one.sample(), kinds() - objects
        assert before.slots_used == after.slots_used
        assert after.preemptions > before.preemptions > 0
        assert after.loaded_tokens > before.loaded_tokens > 0
        assert (after.leases, after.tracked, after.jobs, after.faults) == (0, 0, 0, 0)
        assert sum(more.values()) <= OBJECTS_PER_REQUEST_MAX * 2 * REQUESTS, more
        assert after.threads <= before.threads + THREADS
        assert after.descriptors <= before.descriptors + THREADS
        assert (after.python_blocks - before.python_blocks) / (2 * REQUESTS) < BLOCKS_PER_REQUEST_MAX


def test_object_kept_for_every_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an object is kept for every request, the count of objects grows."""
    kept: list[Tracked] = []
    with player({"pool_bytes_max": "1MiB", "tiers": []}) as one:
        side = one.engine.connector.scheduler
        assert side is not None
        finish = side.requests.finish

        def leak(tracked: Tracked) -> None:
            kept.append(tracked)
            finish(tracked)

        monkeypatch.setattr(side.requests, "finish", leak)
        one.play(20)
        before = one.sample()
        one.play(20)
        assert one.sample().objects >= before.objects + 20


def test_objects_are_counted_when_a_class_names_no_module() -> None:
    """Some libraries' classes have no string as their module's name."""
    with player({"pool_bytes_max": "1MiB", "tiers": []}) as one:
        made = type("Nameless", (), {"__module__": FunctionType.__code__})()
        assert kinds()
        assert one.sample().objects
        assert any(other is made for other in gc.get_objects())


def samples(per_request: float, requests: int = 1000) -> list[MemorySample]:
    """Return samples of a process that grows at first, and later by `per_request` bytes per request."""
    steps = range(requests // 10, requests + 1, requests // 10)
    return [MemorySample(n, resident_bytes=int(min(n, 300) * 50_000 + n * per_request), threads=7) for n in steps]


@pytest.mark.parametrize(("mine", "theirs", "flat"), [(0, 0, True), (400, 0, True), (700, 0, False),
                                                      (40_400, 40_000, True), (0, -9000, True)])  # fmt: skip
def test_verdict_leaves_out_the_warm_up_and_growth_of_vllm(mine: float, theirs: float, flat: bool) -> None:
    """The verdict ignores growth during the warm-up and vLLM's own growth. The message names both slopes."""
    assert slope(samples(mine)) == pytest.approx(mine, abs=1)
    is_flat, message = memory_verdict(samples(theirs), samples(mine))
    assert is_flat == flat
    assert ("NOT flat" in message) != flat
    assert f"{mine:+.0f} bytes per request with kvpipe, {theirs:+.0f} without" in message


def test_objects_that_pile_up_are_not_flat() -> None:
    """Two hundred bytes per request are within the memory limit.

    One object per two requests exceeds the object limit.
    """
    piled = [replace(one, objects=one.requests // 2) for one in samples(200)]
    flat, message = memory_verdict(samples(0), piled)
    assert not flat
    assert "(+0.50 per request)" in message


def test_the_plot_and_the_table() -> None:
    """The plot and the table show the first and the last sample."""
    drawn = plot({"plain": samples(0), "piped": samples(50_000)}).splitlines()
    assert len(drawn) == soak.PLOT_ROWS + 3
    assert drawn[1].rstrip().endswith("d")
    assert "n" in drawn[-3]
    rows = sampled_rows("", samples(0)).columns[0]._cells
    assert (rows[0], rows[-1]) == ("100", "1000")


def test_allocations_are_counted() -> None:
    """The bytes that C's allocator has allocated grow with an allocation, if the allocator reports them."""
    before = soak.malloc_bytes()
    kept = SimpleNamespace(data=bytearray(32 << 20))
    assert soak.malloc_bytes() == 0 or soak.malloc_bytes() >= before + len(kept.data)
