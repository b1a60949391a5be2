"""What a mutant is: a bug that is put back in, and who must find it."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER = "kvpipe.connectors.vllm.scheduler:SchedulerSide"
CURSOR = "kvpipe.statemachine.core:Cursor"
ADAPTERS = "kvpipe.connectors.vllm.adapters:Adapters"
HELD_ADAPTERS = "kvpipe.connectors.vllm.held_adapters:HeldAdapters"
SAVING = "kvpipe.connectors.vllm.saving:Saving"
STORING = "kvpipe.connectors.vllm.storing:Storing"
PREFIXES = "kvpipe.connectors.vllm.prefixes:Prefixes"
WORKER = "kvpipe.connectors.vllm.worker:WorkerSide"
CONNECTOR = "kvpipe.connectors.vllm.connector:KVPipeConnector"
PIPELINE = "kvpipe.pipeline:Pipeline"
CATALOG = "kvpipe.catalog:Catalog"
STAGING = "kvpipe.connectors.vllm.staging:Staging"


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
