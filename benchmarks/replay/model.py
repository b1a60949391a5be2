"""What computing and carrying cost. Every figure is a parameter; nothing here was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

GIGA: Final = 1e9


@dataclass(frozen=True)
class Model:
    """An engine's device and the model on it. The defaults are Llama 3.1 8B in 16 bits on four H100, which reach 40 %.

    A token costs 2 FLOP per parameter, and its attention 4 per layer, per element of the hidden state and per token
    before it. A prompt is computed in steps of at most `step_tokens`, beside others'. Decoding costs the device
    nothing: a request only keeps its blocks for `answer_s_per_token` each.
    """

    parameters: float = 8.0e9
    layers: int = 32
    hidden: int = 4096
    flop_per_s: float = 1.6e15
    bytes_per_token: int = 131_072
    device_tokens: int = 800_000
    """What the device's own prefix cache holds, those of running requests included."""
    step_tokens: int = 8192
    step_s: float = 0.005
    """Of each step, beside its tokens."""
    answer_s_per_token: float = 0.02
    requests_max: int = 128

    def prefill_s(self, first: int, stop: int) -> float:
        """Return how long tokens [first, stop) of one prompt take."""
        own = 2 * self.parameters * (stop - first)
        attention = 2 * self.layers * self.hidden * (stop**2 - first**2)
        return (own + attention) / self.flop_per_s


@dataclass
class Link:
    """One direction between two places. What is carried takes its turn; the latency of one hides behind others."""

    bytes_per_s: float
    latency_s: float = 0.0
    moved: int = 0
    """Bytes so far."""
    _free_at_s: float = field(default=0.0, repr=False)

    def carry(self, size: int, at_s: float) -> float:
        """Begin at `at_s`, or when what came before is over; return when `size` bytes have arrived."""
        self._free_at_s = max(at_s, self._free_at_s) + size / self.bytes_per_s
        self.moved += size
        return self._free_at_s + self.latency_s


@dataclass(frozen=True)
class Store:
    """A tier behind memory. It drops the least recently used chunk when it holds `slots`."""

    name: str
    slots: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    lanes: int = 4


@dataclass(frozen=True)
class Host:
    """The pool in memory, and the way to it."""

    slots: int
    bytes_per_s: float = 50 * GIGA
    """Each way."""


def disk(slots: int) -> Store:
    """Return an NVMe disk."""
    return Store("disk", slots, 6 * GIGA, 3 * GIGA, 0.0005)


def network(slots: int) -> Store:
    """Return a store behind a network of 25 Gbit/s, as Redis or Mooncake may be."""
    return Store("network", slots, 3 * GIGA, 3 * GIGA, 0.001)
