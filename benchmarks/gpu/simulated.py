"""A fake device that runs every call at once. It tests the benchmarks themselves. Its times are meaningless."""

from __future__ import annotations

from kvpipe.testing.fake_device import FakeDevice, FakeStream, QueuedCall


class _Stream(FakeStream):
    def put(self, work: QueuedCall) -> None:
        super().put(work)
        self.device.drain()


class Immediate(FakeDevice):
    """A fake device whose streams have done all their work when a call returns."""

    def stream(self, name: str) -> FakeStream:
        """Make a stream that runs its work at once."""
        made = _Stream(self, name)
        self.streams.append(made)
        return made
