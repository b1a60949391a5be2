"""What a mutant is: a bug that is put back in, and who must find it."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER = "kvpipe.scheduler.side:SchedulerSide"
LOOKUPS = "kvpipe.scheduler.lookups:Lookups"
REQUESTS = "kvpipe.scheduler.requests:Requests"
RESETS = "kvpipe.scheduler.resets:Resets"
SWITCHES = "kvpipe.scheduler.switches:Switches"
LAYER_CURSOR = "kvpipe.statemachine.copy:LayerCursor"
ADAPTERS = "kvpipe.scheduler.adapters:Adapters"
HELD_ADAPTERS = "kvpipe.worker.adapters:HeldAdapters"
JOBS = "kvpipe.scheduler.jobs:Jobs"
REPORTED = "kvpipe.scheduler.jobs:Reported"
SAVE_PROGRESS = "kvpipe.scheduler.records:SaveProgress"
LOADING = "kvpipe.scheduler.loads:Loading"
SAVING = "kvpipe.scheduler.saves:Saving"
STORING = "kvpipe.scheduler.stores:Storing"
PREFIXES = "kvpipe.cache.prefixes:Prefixes"
SPANS = "kvpipe.scheduler.spans:Spans"
WORKER = "kvpipe.worker.side:WorkerSide"
INVALID_BLOCKS = "kvpipe.connectors.vllm.remedies.invalid_blocks:InvalidBlocks"
CONNECTOR = "kvpipe.connectors.vllm.connector:KVPipeConnector"
PIPELINE = "kvpipe.worker.pipeline:Pipeline"
COPIES = "kvpipe.worker.copies:Copies"
CATALOG = "kvpipe.cache.catalog:Catalog"
STAGING = "kvpipe.scheduler.fetches:Staging"
GEOMETRY = "kvpipe.geometry:Geometry"
GROUP = "kvpipe.geometry:Group"
PAGING = "kvpipe.geometry:Paging"


class Patch(NamedTuple):
    """`old` becomes `new` in one method of the class `where`, or in all that have it when `method` is ``*``.

    Both are written as if the method's `def` began its line. `where` is "module:Class", or a module, for its functions.
    """

    where: str
    method: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One bug: what it does, and where it is put.

    `shape`: where it is looked for first. `by`: the only invariant that is asked, where a lesser one would always be
    the first to see it and what it ruins would go untested. `test`: the pytest node that must fail, for what no trial
    can see; nothing else is tried then.
    """

    does: str
    patches: tuple[Patch, ...]
    shape: str = "sync"
    by: str = ""
    test: str = ""


def one(where: str, method: str, old: str, new: str) -> tuple[Patch, ...]:
    """Return the only patch of a mutant."""
    return (Patch(where, method, old, new),)
