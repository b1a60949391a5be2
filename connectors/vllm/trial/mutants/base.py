"""The parts of a mutant: a bug that is put back into the code, and the check or test that must find it."""

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
REPORTED = "kvpipe.scheduler.reported:Reported"
SAVE_PROGRESS = "kvpipe.scheduler.records:SaveProgress"
FAILED_LOADS = "kvpipe.scheduler.failed_loads:FailedLoads"
LOADING = "kvpipe.scheduler.loads:Loading"
SAVING = "kvpipe.scheduler.saves:Saving"
STORING = "kvpipe.scheduler.stores:Storing"
PREFIXES = "kvpipe.cache.prefixes:Prefixes"
SPANS = "kvpipe.scheduler.spans:WholeSpans"
WORKER = "kvpipe.worker.side:WorkerSide"
INVALID_BLOCKS = "kvpipe.connectors.vllm.remedies.invalid_blocks:InvalidBlocks"
CONNECTOR = "kvpipe.connectors.vllm.connector:KVPipeConnector"
REMEDIES = "kvpipe.connectors.vllm.engine_protocols:Remedies"
SCHEDULER_ROLE = "kvpipe.connectors.vllm.scheduler_role:SchedulerRole"
WORKER_ROLE = "kvpipe.connectors.vllm.worker_role:WorkerRole"
PIPELINE = "kvpipe.worker.pipeline:Pipeline"
COPIES = "kvpipe.worker.copies:Copies"
CATALOG = "kvpipe.cache.catalog:Catalog"
STAGING = "kvpipe.scheduler.fetches:Staging"
GEOMETRY = "kvpipe.protocol.geometry:Geometry"
GROUP = "kvpipe.protocol.geometry:Group"
PAGING = "kvpipe.protocol.geometry:Paging"


class Patch(NamedTuple):
    """A replacement of `old` by `new` in one method of the class `where`, or in all methods that contain `old` (``*``).

    Both texts are written with the indentation that they have if the method's `def` starts at column 0. `where` is
    "module:Class", or a module for the module's functions.
    """

    where: str
    method: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One bug: its effect and its patches.

    `shape` is the shape that is tried first. `by` is the only invariant that is checked. `by` is set if a weaker
    invariant would always find the bug first, so that the bug's main effect would go untested. `test` is the pytest
    node that must fail, for a bug that no trial can find. No trial runs for such a bug.
    """

    does: str
    patches: tuple[Patch, ...]
    shape: str = "sync"
    by: str = ""
    test: str = ""


def one(where: str, method: str, old: str, new: str) -> tuple[Patch, ...]:
    """Return the only patch of a mutant."""
    return (Patch(where, method, old, new),)
