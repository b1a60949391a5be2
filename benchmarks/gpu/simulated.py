"""A device that does at once what it is asked to: proves that the benchmarks run, and shows nothing about time."""

from __future__ import annotations

from kvpipe.testing.fake_device import FakeDevice, FakeStream, Work


class _Stream(FakeStream):
    def put(self, work: Work) -> None:
        super().put(work)
        self.device.drain()


class Immediate(FakeDevice):
    """Every stream is empty again when a call returns."""

    def stream(self, name: str) -> FakeStream:
        """Make a stream."""
        made = _Stream(self, name)
        self.streams.append(made)
        return made
