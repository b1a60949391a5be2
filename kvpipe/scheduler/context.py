"""The context of a scheduler side: the objects that nearly all of its parts need. A context never changes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import make_policy
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.node.operated import OperatedCatalog

if TYPE_CHECKING:
    from kvpipe.cache.prefixes import Prefixes
    from kvpipe.config.settings import Settings
    from kvpipe.node.client import NodePool
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.scheduler.events import Events
    from kvpipe.trace.log import Counters
    from kvpipe.trace.recorder import Recorder


class StepCounter:
    """The only counter of steps on the scheduler's side.

    `planned` is the number of planned steps. A lookup, admission or report gets the number `planned` until the next
    step is planned.
    """

    __slots__ = ("planned",)

    def __init__(self) -> None:
        """Start before the first step."""
        self.planned = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that the parts of a scheduler side share. Each part gets the context as its first argument."""

    settings: Settings
    geometry: Geometry
    catalog: Catalog
    prefixes: Prefixes
    counters: Counters
    trace: Recorder
    events: Events
    steps: StepCounter = field(default_factory=StepCounter)


def make_catalog(
    settings: Settings, geometry: Geometry, counters: Counters, *, ready: int | None, node: NodePool | None = None
) -> Catalog:
    """Return an empty catalog. If the engine uses a node's memory, the catalog uses the slots of `node`.

    `ready` is the number of slots that may be used before ranks report the number of ready slots. If `ready` is
    None, all slots may be used.
    """
    slots, groups = geometry.slots, len(geometry.groups)
    if node is not None:
        return OperatedCatalog(node, groups, counters, geometry.units_per_chunk)
    make = functools.partial(make_policy, settings.policy, fault=counters.fault)
    if settings.quotas:
        return SharedCatalog(slots, groups, Accounts(settings.quotas, slots, make), counters, ready=ready)
    return Catalog(slots, groups, make(slots), counters, ready=ready)
