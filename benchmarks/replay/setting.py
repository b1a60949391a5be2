"""The parameters of a replay with tiers: the size and bandwidth of memory and of each tier, and the device's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from benchmarks.replay.model import Host, Model, Store, disk, network
from benchmarks.replay.workload import Workload


@dataclass(frozen=True)
class Place:
    """A tier. `share` is the share of all different chunks of a workload that the tier holds."""

    share: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0

    def store(self, name: str, load: Workload) -> Store:
        """Return the tier with the number of slots for the workload `load`."""
        return Store(name, load.slots(self.share), self.read_bytes_per_s, self.write_bytes_per_s, self.latency_s)


def _place(share: float, one: Store) -> Place:
    return Place(share, one.read_bytes_per_s, one.write_bytes_per_s, one.latency_s)


@dataclass(frozen=True)
class Memory:
    """The pool. `share` is the share of all different chunks of a workload that the pool holds.

    `bytes_per_s` is the bandwidth of each direction between the pool and the device.
    """

    share: float = 0.10
    bytes_per_s: float = Host.bytes_per_s


@dataclass(frozen=True)
class Setting:
    """All parameters of a replay with tiers. `docs/results/traces.json` was measured with the defaults."""

    model: Model = field(default_factory=Model)
    memory: Memory = field(default_factory=Memory)
    disk: Place = field(default_factory=lambda: _place(0.25, disk(0)))
    network: Place = field(default_factory=lambda: _place(1.0, network(0)))

    def host(self, load: Workload) -> Host:
        """Return the pool for a workload."""
        return Host(load.slots(self.memory.share), self.memory.bytes_per_s)

    def stores(self, behind: str, load: Workload) -> tuple[Store, ...]:
        """Return the tiers whose names `behind` lists, separated by commas, the nearest tier first."""
        places = {"disk": self.disk, "network": self.network}
        return tuple(places[name].store(name, load) for name in behind.split(", ") if name)

    def with_set(self, part: str, given: Sequence[str]) -> Setting:
        """Return a copy with `given`, such as `bytes_per_s=2e10`, set in `part`.

        Raises ValueError if a name or a number of `given` is not allowed.
        """
        return replace(self, **{part: _changed(getattr(self, part), given)})

    def places(self) -> dict[str, Any]:
        """Return all parameters except the model's, as plain data."""
        return {name: one for name, one in asdict(self).items() if name != "model"}


PARTS: Final = tuple(one.name for one in fields(Setting))


def _changed(part: Any, given: Sequence[str]) -> Any:  # a dataclass of numbers
    known, changes = asdict(part), dict[str, float]()
    for one in given:
        name, _, text = one.partition("=")
        if name not in known:
            raise ValueError(f"{one}: there is no {name}; there are {', '.join(known)}")
        number = float(text)
        if not 0 <= number < float("inf") or (name != "latency_s" and not number):
            raise ValueError(f"{one}: expected a number above 0")
        if name == "share" and number > 1:
            raise ValueError(f"{one}: a share is 1 at most")
        changes[name] = type(known[name])(number)
    return replace(part, **changes)
