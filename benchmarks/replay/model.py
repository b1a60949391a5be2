"""Cost models of computing and copying. All figures are parameters. No figure was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

GIGA: Final = 1e9


@dataclass(frozen=True)
class Model:
    """An engine's device and the model that runs on it.

    The defaults are Llama 3.1 8B in 16 bits on four H100 at 40 % of their peak FLOP/s. A token costs 2 FLOP per
    parameter. Its attention costs 4 FLOP per layer, per element of the hidden state and per earlier token. A step
    computes at most `step_tokens` prompt tokens of all requests together. Decoding takes no computing time, but a
    request keeps its blocks for `answer_s_per_token` seconds per token of its answer.
    """

    parameters: float = 8.0e9
    layers: int = 32
    hidden: int = 4096
    flop_per_s: float = 1.6e15
    bytes_per_token: int = 131_072
    device_tokens: int = 800_000
    """The number of tokens for which the device has blocks, including blocks of running requests."""
    step_tokens: int = 8192
    step_s: float = 0.005
    """The fixed time of each step in seconds, in addition to the time of its tokens."""
    answer_s_per_token: float = 0.02
    requests_max: int = 128

    def prefill_s(self, first: int, stop: int) -> float:
        """Return the time in seconds to compute the tokens [first, stop) of one prompt."""
        own = 2 * self.parameters * (stop - first)
        attention = 2 * self.layers * self.hidden * (stop**2 - first**2)
        return (own + attention) / self.flop_per_s


@dataclass
class Link:
    """One direction between two places. Transfers run one after another, but the transfers' latencies overlap."""

    bytes_per_s: float
    latency_s: float = 0.0
    moved: int = 0
    """The number of bytes that were copied so far."""
    _free_at_s: float = field(default=0.0, repr=False)

    def carry(self, size: int, at_s: float) -> float:
        """Start a transfer at `at_s`, or when all earlier transfers have ended. Returns when the transfer ends."""
        self._free_at_s = max(at_s, self._free_at_s) + size / self.bytes_per_s
        self.moved += size
        return self._free_at_s + self.latency_s


@dataclass(frozen=True)
class Store:
    """A tier below memory, which holds at most `slots` chunks, and evicts the least recently used chunk."""

    name: str
    slots: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    lanes: int = 4


@dataclass(frozen=True)
class Host:
    """The pool in memory, and the link between the pool and the device."""

    slots: int
    bytes_per_s: float = 50 * GIGA
    """The bandwidth of each direction of the link."""


def disk(slots: int) -> Store:
    """Return the tier of an NVMe disk."""
    return Store("disk", slots, 6 * GIGA, 3 * GIGA, 0.0005)


def network(slots: int) -> Store:
    """Return a tier over a network of 25 Gbit/s, such as Redis or Mooncake."""
    return Store("network", slots, 3 * GIGA, 3 * GIGA, 0.001)
