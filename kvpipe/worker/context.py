"""The context of a worker side: the objects that all parts of the worker side share. A context never changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpipe.config.settings import Settings
from kvpipe.machine.cores import spare_cpus
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder


@dataclass(frozen=True, slots=True)
class RankContext:
    """The objects that the parts of one rank share. `rank` is one of `ranks`. `cpus` are the cores of kvpipe's threads.

    If `cpus` is empty, the threads run on every core of the process.
    """

    settings: Settings
    rank: int = 0
    ranks: int = 1
    counters: Counters = field(default_factory=Counters)
    trace: Recorder = OFF
    cpus: frozenset[int] = field(default_factory=spare_cpus)
