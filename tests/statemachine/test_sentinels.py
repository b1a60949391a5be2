"""States belong in state machines: every attribute that may have a sentinel is listed with a reason.

A sentinel is None, a negative number, infinity, or a number that no count reaches, such as `1 << 60`. Booleans are in
`test_flags.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.statemachine.test_flags import ROOT, _pairs

HUGE_BITS = 32
"""In the code, a number shifted left by at least this many bits is a sentinel."""
WATCH = "of tracing: the function that is called at each move; None: not traced"
ROUTERS = "configuration: an engine may have no routers"
TIERS = "configuration: an engine without tiers has none"
POLICY = "of the policy: None if the policy does not have this method"
BOUND = "the engine binds its blocks once, before the first step"
CACHED = "a value that is computed at its first use, and again after its inputs have changed"
OPENED = "a resource: -1 while it is not open"
CONNECTED = "content of the connection: there is none before the first one, and the client machine has the state"
REPLAYED = "of a replayed trace: -1 or 0 before the first event of this kind"

SENTINELS: dict[str, dict[str, str]] = {
    "kvpipe/features": {
        "Announcement.request": "configuration: None if there are no routers to notify",
        "KnownPrompt.adapter": "content: a prompt may have no adapter",
        "Order.result": "content of an answer, written before `Order.over`",
        "Order.work": "created with the order's first part",
        "Prefetch.announced": "content: an operator's prompt was not announced",
        "Prefetch.request": "configuration: None if there are no routers to notify",
        "Prefetch.stage": "created when its fetch begins; from then on the stage machine has the state",
        "Prefetching._routed": ROUTERS,
        "Prefetching._staging": TIERS,
        "Prefetching._stops_s": "the deadline of an idle engine; a busy engine has none",
    },
    "kvpipe/scheduler": {
        "Asking.watch": WATCH,
        "FailedLoads.blocks": BOUND,
        "JobInFlight.owner": "content: a load has an owner of its leases, and a save has pieces",
        "JobInFlight.watch": WATCH,
        "Loading.stall": "configuration: only with `load=auto`",
        "Lookups._staging": TIERS,
        "RequestContext.answer": "content of the last event of a lookup, so that it is reported once",
        "RequestStage.short_at_s": "a time: infinite if no chunk is missing, so that the lookup is not repeated",
        "Requests._priority_of": "configuration: an engine may have no priorities",
        "Requests._staging": TIERS,
        "Resets._node": "configuration: only with `pool=node`",
        "Resets._staging": TIERS,
        "SaveProgress.next_save_at_tokens": "a function of the saving machine's state, cached for each step",
        "SaveProgress.watch": WATCH,
        "Saving.blocks": BOUND,
        "SchedulerSide._idle": "configuration: only some engines wait for loads in steps that compute nothing",
        "SchedulerSide._spans": "configuration: an engine may have no spans",
        "SchedulerSide.node": "configuration: only with `pool=node`",
        "SchedulerSide.staging": TIERS,
        "WholeSpans.blocks": BOUND,
        "Staging.tier_blocks": ROUTERS,
        "Staging.watch": WATCH,
        "Staging.watch_transfer": WATCH,
        "Storing.tier_blocks": ROUTERS,
        "Storing._stops_s": "the deadline of an idle engine; a busy engine has none",
        "Tracked.stage": "created by a lookup; from then on the stage machine has the state",
        "AdapterUse.asked_step": "a step: -1 if the engine has not looked up the request yet",
    },
    "kvpipe/worker": {
        "WorkerSide._plan": "the engine binds a step and unbinds it; the step machine has the state of a step's jobs",
        **dict.fromkeys(
            ("Copies._checks", "Pipeline._checks", "Watchdog._checks"),
            "configuration: slots of a private pool have no marks",
        ),
        "Copies._scrub": "configuration: a method of the transfer engine; tests of copies alone have none",
        "Batch.checked": "content: the event of the digests; a batch whose slots are not read has none",
        "Batch.held": "content: the ticket that is handled again when the digests are compared",
        "SlotChecks._thread": "configuration: marks without digests need no thread",
        "WorkerSide._ready_reported": "content of the last report: the first report has the slots in any case",
    },
    "kvpipe/cache": {
        **dict.fromkeys(("Account.answered", "Account.hint", "Account.request"), POLICY),
        **dict.fromkeys(("Catalog._answered", "Catalog._dropped", "Catalog._guard"), POLICY),
        **dict.fromkeys(("Catalog._hint", "Catalog._request"), POLICY),
        **dict.fromkeys(("SharedCatalog._answered", "SharedCatalog._hint", "SharedCatalog._request"), POLICY),
        "Catalog._clock": "configuration: tests use their own clock",
        "Catalog.on_drop": "configuration: None if there are no routers to notify",
        "Catalog.ready": "a parameter: None if all slots are ready at once",
        "Catalog.watch": WATCH,
        "Chunk.watch": WATCH,
        "Prefixes._spans_of": "configuration: an engine may have no spans",
        "Tenant.adapter": "content: a tenant may have no adapter",
    },
    "kvpipe/cache/policy": {
        **dict.fromkeys([f"RescuedPolicy.{name}" for name in ("_answered", "_dropped", "_hint", "_request")], POLICY),
        **dict.fromkeys(("Queues._least", "WorthTable._chances", "WorthTable.computed", "_Everybody._usual"), CACHED),
        "Chain.ended_s": "a time: None while a request uses the chain, because it has not ended then",
        "Chain.hint": "content: most chains have no hint",
        "Chain.number": "content: a number of `large`, or none while no chunk of the chain has had a place",
        "Chain.pace": "content: a chain without a pause has no pace",
        "_Stretch.newer": "of a linked list: the newest stretch has no newer one",
        "_Stretch.older": "of a linked list: the oldest stretch has no older one",
    },
    "kvpipe/cli": {
        "EngineList.node": "configuration: None if no memory is watched",
        "SeenEngine.holders": "content of an answer: an engine that does not answer has none",
        "SeenNode.health": "content of an answer: there is none before the first, and none of a foreign holder",
    },
    "kvpipe/inputs": {
        "NameClaim._fd": OPENED,
        "OperatorSocket._lock": OPENED,
    },
    "kvpipe/manage": {
        "Bell._loop": "the loop of the waiting thread; nobody waits before there is one",
        "BoundedConnection._end": "a timer, set when the connection is made",
        "BoundedConnection._late": "a timer: only a connection that waits for headers has one",
        "ManagedEngine._request_of": "configuration: None without KV events",
    },
    "kvpipe/node": {
        "Evictor._answered": "configuration: only of an `AnsweredPolicy`",
        "Evictor._dropped": "configuration: only of a `RememberingPolicy`",
        "Evictor._request": "configuration: only of a `SessionPolicy`",
        "Listener._rests_until_s": "a time: None while the holder accepts connections",
        "NodeUses._answer": "content of a use: None if the request has not ended, or its answer is unknown",
        **dict.fromkeys([f"NodePool.{name}" for name in ("_mark", "_reached", "leases")], CONNECTED),
        **dict.fromkeys(("NodePool.named", "NodePool.segment"), CONNECTED),
        **dict.fromkeys(("Keeper._watch", "Stock.watch"), WATCH),
        "SharedChunk.saved_for": "content: the request whose tokens the note gets, or None if no note is due",
        "SharedChunk.answered_at": "content: the position of the journal at the answer, or None before the answer",
        "Holder._keep_s": "a parameter: negative after a signal, so that the holder ends with its last client",
        "Holder._memory": "created with the memory",
        "HolderConnection.client": "content: an operator's connection has no client",
        "HolderConnection.keeper": "content: an operator's connection has no client",
        "LazyNumpy._thread": "created at the first call",
        "NodeLeases.row": "a latch: negative once a holder has freed the row",
        "Keeper.short": "content: no slot was missing",
        "SlotNotes.routers": "configuration: only with KV events",
        "NodeCatalog._follower": "created when the namespace has a number; lookups miss before that",
        "Segment.slots": "configuration: an operator's command maps only the tables",
        "Silence._seen": "content: the last count that was seen; no count is negative",
    },
    "kvpipe/threads": {
        "AdapterReader._loop": "a thread that is created at its first use",
        "LoopThread._loop": "the thread sets it before the constructor's caller goes on",
    },
    "kvpipe/tiers": {
        "Carrier._rest": "created at its first use: the scope of a task",
        "ClientTier._child": "a process: None between close and open",
        "TierLookup.misses": "configuration of a lookup: None if misses are not recorded",
        "TierLookup.tiers": "a parameter: None if every tier is asked",
        "TierThread._group": "the thread sets it before it takes the first work",
    },
    "kvpipe/tiers/disk": {
        "DiskRoom._desk": "a resource: None while it is not open",
        "DiskTier._looker": "a thread that is created by open",
        "Index.on_gone": "configuration: None if nobody is notified",
        "Root._device": "content: unknown before the folder is opened for the first time",
        "_Shelf.changed_ns": "content: None if the folder may have changed since its last listing",
        "_Shelf.seen_ns": "content: a folder that was never listed has no time",
    },
    "kvpipe/tiers/mooncake": {
        "SlotFills._client": "content: the process that has mapped the slots; a new process maps them again",
        "SlotFills._slots": "configuration: only with slots that engines share",
        "Worker._windows": "configuration: only with slots that engines share",
    },
    "kvpipe/tiers/redis": {"ServerConnection._sock": "redis-py's own: None while it is not connected"},
    "kvpipe/trace": {
        **dict.fromkeys([f"Life.{name}" for name in ("_admission", "_since_event", "epoch", "job")], REPLAYED),
        "FileSink._fd": OPENED,
        "Life.since_ns": "a time: it is set to one that may be None only after a check",
        "Trace._wanted": "a parameter: None if all events are wanted",
        "_Clocks.origin_ns": "content: the earliest time; there is none before the first event",
    },
    "kvpipe/transfer": {
        **dict.fromkeys(("CopyPlan._merged", "CopyPlan._runs", "DirectionQueues.places"), CACHED),
        **dict.fromkeys(("CopyPlan.mark", "Ticket.mark"), "content: the transfer engine's own, if it sets one"),
        "CudaEngine._given": "configuration: the caches' device if it is not given",
        "CudaEngine._pinned_mover": "configuration: the fastest mover of each plan if it is not given",
        "CudaEngine._poll_us_min": "configuration: depends on the device if it is not given",
        "DirectionQueues._staging": "configuration: movers without a staging area have none",
        "DirectionQueues._tables": "created with the caches' layout, before the first copy",
        "Driver._batch": "a function of the driver: None if the driver lacks it or refuses it",
        "HostPool.marks": "configuration: slots of a private pool have no marks",
        "PlanQueue.computed": "content: the event of the first tickets; None if no such ticket is left",
        "PlanQueue.prepared": "content: a plan that was not prepared has nothing prepared",
        "Prepared.start": "content: a load has an event after which it runs, and a save has none",
        "Readier._thread": "a thread that is created by start",
        "_Bay.free": "content: a bay that was never used has no event to wait for",
    },
    "connectors/vllm": {
        "KVPipeConnector.scheduler": "configuration: the worker's role has no scheduler side",
        "Remedies._blocks": BOUND,
        "SchedulerRole.events": "configuration: only if the engine publishes KV events",
        "WorkerRole._introduction": "content of a report, created once with the caches",
    },
    "connectors/vllm/remedies": {"Encoded._doubted": "content of the last answer; None: not asked since the step"},
    "statemachine": {"Cursor.watch": WATCH},
}
"""By folder: "Class.attribute", and the reason why its sentinel is no state of a machine."""


def _is_sentinel(value: ast.expr | None, names: set[str]) -> bool:
    """Whether an expression may be a sentinel. `names` are constants and parameters that may be sentinels."""
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.BinOp):
        shifted = isinstance(value.op, ast.LShift) and isinstance(value.right, ast.Constant)
        return shifted and int(ast.unparse(value.right)) >= HUGE_BITS
    if isinstance(value, ast.IfExp):
        return _is_sentinel(value.body, names) or _is_sentinel(value.orelse, names)
    if isinstance(value, ast.Call):
        return ast.unparse(value) == "float('inf')"
    return isinstance(value, ast.Name) and value.id in names


def _sentinels_of(kind: ast.ClassDef, constants: set[str]) -> Iterator[str]:
    for method in kind.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        arguments = [*method.args.args, *method.args.kwonlyargs]
        optional = {one.arg for one in arguments if one.annotation and ast.unparse(one.annotation).endswith("| None")}
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target, value in (pair for one in targets for pair in _pairs(one, node.value)):
                mine = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                if isinstance(target, ast.Attribute) and mine and _is_sentinel(value, constants | optional):
                    yield f"{kind.name}.{target.attr}"


def _sentinels_in(room: str) -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / room).glob("*.py"))]
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.AnnAssign)]
    constants = {
        ast.unparse(one.target) for one in assigned if one.value is not None and _is_sentinel(one.value, set())
    }
    kinds = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {name for kind in kinds for name in _sentinels_of(kind, constants)}


def _rooms() -> set[str]:
    """Return all folders of the product. Trials and `kvpipe.testing` are left out, because they are tests."""
    linked = ("kvpipe/connectors", "kvpipe/statemachine", "kvpipe/testing", "connectors/vllm/trial")
    files = (path for top in ("statemachine", "kvpipe", "connectors") for path in (ROOT / top).rglob("*.py"))
    rooms = {str(path.parent.relative_to(ROOT)) for path in files}
    return {room for room in rooms if not room.startswith(linked)}


@pytest.mark.parametrize("room", sorted(_rooms()))
def test_every_sentinel_has_a_reason(room: str) -> None:
    """An attribute that is not listed is new, and its sentinel may be a state. A listed attribute must exist."""
    reasons = SENTINELS.get(room, {})
    assert _sentinels_in(room) == set(reasons)
    assert all(reasons.values())


def test_every_listed_folder_exists() -> None:
    """Every folder in the list exists."""
    assert sorted(SENTINELS.keys() - _rooms()) == []


def test_test_sees_each_kind_of_sentinel() -> None:
    """The test finds one sentinel of each kind, and does not report a number that is no sentinel."""
    code = "class A:\n def __init__(self, b: int | None):\n  self.a, self.b, self.c, self.d = None, b, -1, 1 << 60\n"
    code += "  self.e = float('inf')\n  self.f = NEVER\n  self.g = 1 if b else None\n  self.h = 1 << 4\n"
    (kind,) = ast.parse(code).body
    assert isinstance(kind, ast.ClassDef)
    assert [*_sentinels_of(kind, {"NEVER"})] == [f"A.{name}" for name in "abcdefg"]
