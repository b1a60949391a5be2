"""States belong in state machines.

Every boolean attribute of a class is listed with the reason why it is no state.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TOPS = ("statemachine", "kvpipe", "connectors")

OF_A_SHAPE = """
    answers asynchronous branches cross deferred dense device drafter events failing fails fresh graphs hints limits
    operators
    priorities quotas resumes sibling slow undropped unmet v2 warms
"""

FLAGS: dict[str, dict[str, str]] = {
    "statemachine": {
        "Edge.moves": "content of a table",
        "Edge.rejects": "content of a table",
        "State.final": "content of a table",
    },
    "kvpipe/trace": {
        "FileSink._regular": "content: whether the opened file is a regular file",
        "FreezeSwitched.on": "content of an event",
        "Life.done": "content of a trace: whether it has the event `request_done`",
        "Life.finished": "content of a trace: whether it has the last move of the request's machine",
        "Life.whole": "content of a trace: whether it has the request's first event",
        "LogSink._requests": "configuration",
        "Lookup.later": "content of an event",
        "Recorder.detail": "configuration",
        "Recorder.lifecycle": "configuration",
        "Recorder.transitions": "configuration",
        "Span.is_open": "content of a trace: whether it lacks the span's end",
        "Started.detail": "content of an event",
    },
    "kvpipe/scheduler": {
        **dict.fromkeys(("EngineFacts.saves", "EngineFacts.loads", "EngineFacts.waits_idle"), "configuration"),
        "AheadStage.announced": "content: whether a hint has announced a request, or an operator warms the prompt",
        "Asking.waits": "content of an answer",
        "Lookups._shares": "configuration: whether chunks come from tiers or from other engines of the node",
        "LookupResult.later": "content of an answer; the lookup machine has the state that follows",
        "RequestContext.sampled": "configuration, by request: whether it is traced",
        "Saving._uncut": "configuration",
        "Stage.slow": "content of an answer: whether it names a tier that is slower than the engine",
        "Staging._consumes": "configuration",
        "Storing._finished_first": "configuration, by the engine's role",
        "Storing._rested": "whether the waiting stores were counted since the engine became idle",
        "Switches.loads": "configuration",
        "Switches.saves": "configuration",
        "Switches.tier_lost": "a latch: a rank has reported that its tier is lost, which is final",
        "AdapterUse.torn": "a latch: the adapter's bytes changed during a request, until the new bytes are known",
        "AdapterUse.waits": "the answer in this step, so that a repeated lookup in the step gets the same answer",
        "Weights._known": "a latch: all ranks have reported their weights, or that they do not know them",
        "Weights.asleep": "vLLM's state: vLLM has unmapped memory of its workers",
        "Weights.awaited": "a latch: not all ranks have sent their introduction, which comes with a step",
    },
    "kvpipe/cache": {
        "Mark.keep": "content: whether the mark stays when the chunk grows",
        "Piece.keep": "content: whether its mark stays when the chunk grows",
        "Prefixes._partial": "configuration: whether a group needs less than the whole prefix",
        "PolicyCall.over": "content: whether the following calls belong to a request that has ended",
    },
    "kvpipe/cache/policy": {
        "Chain.orphan": "content: whether it follows a chunk that is not in memory",
        "Chain.shared": "a latch: prompts have diverged behind it",
        "Duel._believed": "a verdict: clients' hints are followed, until LRU is proven to hit more",
        "Duel._hinted": "a latch: a client has given a hint",
        "Duel.learnt": "a verdict: which of two orders evicts; a function of counts, with hysteresis",
        "Sessions._bare": "content: whether no chain follows the chain being evicted",
        "Sessions._over": "content of the last `request`: whether the request has ended",
    },
    "kvpipe/tiers": {
        "Bodies._is_shared": "configuration: whether several engines share the slots",
        "Carried.ok": "content of a report",
        "RankParts.fetches": "configuration: whether no other rank fetches the same bytes into the same slots",
        "ClientChannel._cancels": "configuration: whether the client understands `CANCEL`",
        "ClientChannel.owed": "of memory: an answer is outstanding, so the client may still write to it",
        "ClientTier._opened": "what the caller asked for: an ended client restarts only between `open` and `close`",
        "FirstHash._leaves": "configuration: rank 0 does",
        "Pool._shut": "a latch: no lane is lent any more",
        "TierLookup.done": "a latch: the loop writes it last, after the answer",
        "TierLookup.down": "content of an answer",
        "TierLookup.survey": "content: whether no request waits for it",
        "TierThread._over": "a latch: no task begins any more",
    },
    "kvpipe/transfer": {
        "CpuEngine._closed": "a latch: no copy begins any more",
        "CudaEngine._closed": "a latch: its completion thread ends",
        "CudaEngine._lost": "a latch: the device's context is dead",
        "GuardedEngine._lost": "a latch: the engine has raised, and gets no further copies",
        "SharedSlots.digests": "configuration",
        "SlotMarks.digests": "configuration",
        "SharedSlots.saves": "of the engine: whether this rank saves the bytes that all ranks share",
        "HostPool.huge_pages": "content: whether the system has granted huge pages",
        "Launch.saving": "content: a direction",
        "Pins._ended": "a latch: nothing is pinned any more",
        "Pins._refused": "of the last call only: so that a refusal is reported once",
        "PlanQueue.lazy": "content of a plan: each of its layers has a reader",
        "PlanQueue.patient": "content of a plan: no forward waits for it",
        "Readier._is_short": "of the last check only: so that a lack of memory is reported once",
        "Readier._touches": "configuration: whether pages are touched before their use",
        "SlotSpan.adjacent": "content: whether the blocks are adjacent",
        "WaveInFlight.last": "content of a plan: it is the plan's last wave",
    },
    "kvpipe/tiers/disk": {
        "DiskRoom._sync": "configuration",
        "DiskSpec.fsync": "configuration",
        "DiskTier._looks": "of a thread: whether a pass over the folder is in progress, so that no second one begins",
        "DiskTier._makes": "configuration: whether a missing folder is created",
        "DiskTier._open": "what the caller asked for: calls before `open` and after `close` are refused",
        "DiskTier._writes": "configuration",
        "DiskTier._yields": "a latch: the log has reported that other files fill the disk",
        "Index._passing": "of a lock: during a pass, keys that this process adds do not count as deleted",
        "ValueFiles._direct": "a latch: the file system has refused direct I/O",
        "ValueFiles._must": "configuration",
    },
    "kvpipe/tiers/redis": {
        "RedisSpec.cluster": "configuration",
        "RedisSpec.tls": "configuration",
        "Server._closed": "a latch: no connection is made any more",
        "ServerConnection._stopped": "a latch: the caller was cancelled, so redis-py must not try again",
    },
    "kvpipe/tiers/s3": {
        "Client._conditional": "a latch: the store does not support writes that replace no object",
        "S3Spec.allow_http": "configuration",
        "S3Tier._opened": "what the caller asked for: an ended client restarts only between `open` and `close`",
        "S3Tier._writes": "configuration",
        "StoreError.full": "content of an answer",
    },
    "kvpipe/tiers/mooncake": {
        "MooncakeTier._opened": "what the caller asked for: an ended client restarts only between `open` and `close`",
        "MooncakeTier._writes": "configuration",
        "Worker.lends": "configuration",
    },
    "kvpipe/manage": {
        "BoundedConnection.access_log": "configuration, of the HTTP server",
        "EngineState.saving": "content of an answer",
        "EngineTotals.saving": "content of an answer",
        "HashedPrompt.unknown": "content of an order: the digest of its adapter is not known",
        "Pending.pending": "content of an answer, so that clients can recognize it",
        "RequestHolds.waits_for_tiers": "content of an answer",
        "SwitchStates.bypass": "content of an answer",
        "SwitchStates.freeze": "content of an answer",
        "TierState.left_by_ranks": "content of an answer",
        "TierState.slow": "content of an answer",
    },
    "kvpipe/worker": {
        "Batch.closed": "no copy is added any more; no cursor shows this, because jobs may have failed before",
        "Batch.stuck": "no copy begins any more; jobs of other batches may have failed, so no cursor shows this",
        "Batch.traced": "configuration: whether one of its jobs is traced in detail",
        "Copies._saves": "of the engine: whether this rank saves the bytes that all ranks share",
        "EngineOptions.idle_core": "configuration",
        "Hooks.fences_late": "configuration: whether the step's end or the next step's first hook calls `fence`",
        "LoadRate._wave_counts": "of a wave that lands: whether it was queued before the last landing",
        "PagedCaches.whole": "content: whether blocks of all layers are contiguous",
        "Pipeline._saves": "of the engine: whether this rank saves the bytes that all ranks share",
        "Pipeline._computes": "of the open step: whether the scheduler planned a forward, known before any hook",
        "SlotChecks._saves": "of the engine: whether this rank saves the bytes that all ranks share",
        "SlotChecks._stopping": "of the digests' thread: whether it ends after the queued batches",
        "WorkerSide._put_off": "of the open step: whether its metrics wait for a later step",
        "WorkerSide.asleep": "of vLLM's worker: vLLM has unmapped the memory of its caches",
        "WorkerSide.lost": "a latch: this rank's tier is lost, which is reported once and is final",
    },
    "kvpipe/testing": {
        "DirectPool.mute": "what a test asked for: answers of the holder wait",
        "DirectPool.slow": "what a test asked for: the holder answers one poll later",
        "FakeDevice.interpreted": "configuration",
        "FakeEvent.broken": "of the simulated device: CUDA's own",
        "FakeEvent.fired": "of the simulated device: CUDA's own",
        "HeldEngine._backwards": "configuration",
        "HeldEngine._device": "configuration",
        "HeldTier.is_held": "what a test asked for: calls of the tier wait",
    },
    "connectors/vllm": {
        "KvEvents._announces": "content: whether the next `take` may announce noted chunks",
        "PromptBlocks._adapters": "configuration",
        "WorkerRole._introduced": "a latch: the rank's introduction was sent",
    },
    "connectors/vllm/remedies": {
        "Encoded._adapts": "configuration",
        "Encoded._held": "of vLLM's encoder cache: whether it may have embeddings",
        "Encoded.old": "of vLLM's encoder cache: whether it may have embeddings of old weights",
    },
    "connectors/vllm/trial": {
        "Case.careful": "configuration",
        "Invariant.outside": "content: whether the invariant applies to any connector",
        "Live.aborted": "what the trial has done: the request was aborted, so its answer may be shorter",
        "Live.closed": "what the trial has done: its session gets no further input",
        "Plan.caches_prefixes": "content: whether vLLM would cache prefixes itself",
        "Rank._drafts": "configuration: whether the rank belongs to the last stage",
        "Steps._pickles": "configuration, by seed",
        "Steps._throttled": "vLLM's own: whether vLLM is asked to postpone prefills",
        "Trial.is_down": "a latch: no move is made any more",
        **dict.fromkeys((f"Shape.{one}" for one in OF_A_SHAPE.split()), "configuration"),
    },
    "connectors/vllm/identity": {
        "Sleep.keeps": "of vLLM's call: whether it resets the caches because the engine falls asleep",
        "_Change.discards": "content of vLLM's call: whether the weights are discarded",
        "_Observed.failed": "a latch: a tensor was changed while it was loaded",
        "_Observed.whole": "content of a report",
    },
    "kvpipe/cli/tier_package": {
        "SqliteTier._open": "what the caller asked for: calls before `open` and after `close` are refused",
    },
    "kvpipe/cli": {
        "SeenNode._always": "configuration: whether an operator has named the folder",
    },
    "kvpipe/config": {
        "Settings.bypass": "configuration",
        "Settings.freeze": "configuration",
        "Settings.log_requests": "configuration",
        "Settings.otel": "configuration",
        "Settings.pool_checksums": "configuration",
        "Settings.pool_or_private": "configuration",
        "Settings.save_decode": "configuration",
        "Settings.save_partial": "configuration",
    },
    "kvpipe/features": {
        "Hinting._tiers": "configuration",
        "Order.always": "content: whether the order is accepted when too many orders wait",
        "Order.failed": "content of an answer",
        "Order.over": "a latch: written after the answer, so a thread that sees it can read the answer",
        "Order.unwanted": "a latch: no thread waits for the result any more",
        "Orders._ended": "a latch: the engine is over",
        "Pin.over": "a latch: its leases are being released, several at a time",
        "Prefetch.over": "a latch: it was dropped; once it is being fetched, the stage machine has the state",
        "Turns._wanted": "of a lock: the engine waits for the turn, so no thread begins another slice",
        "Turns.away": "of a lock: whether the engine has given the turn away, read without taking the turn",
    },
    "kvpipe/inputs": {
        "OperatorSocket._bound": "of a file: whether the file is this socket's, so that it is deleted with the socket",
    },
    "kvpipe/node": {
        "NodePool._asks": "of its connection: a batch has no answer yet; a new connection begins without one",
        "NodePool.takes_hints": "content of an answer: of the memory's policy",
        "NodeUses._over": "of the policy's last call, which the next call completes",
        "Publish.over": "content of a report",
        "RefusedError.again": "content of an answer",
        "SharedChunk.over": "content of the chunk's report: whether its request had ended before it landed",
        "SharedChunk.sealed": "of the chunk's writer: whether it adds no more units, known before they have landed",
        "Unwelcome.again": "content of an answer",
        "Use.more": "content of a message",
        "Welcome.takes_hints": "content of an answer",
    },
    "kvpipe/protocol": {
        "Geometry.branches_within": "configuration",
        "Group.local": "content: a kind of attention",
        "Group.state": "content: a kind of cache",
        "Hit.waits": "content of an answer",
        "Outcome.ok": "content of a report",
        "Report.lost": "content of a report",
        "StepPlan.computes": "content of a plan",
        "TierOrder.stores": "content of an order: a direction",
    },
    "kvpipe/threads": {
        "LoopThread._awake": "of its inbox: a wake-up is under way, so no second one is sent",
        "LoopThread._stopping": "a latch: its inbox takes nothing any more",
        "Reading.settled": "content of an answer",
    },
}
"""By folder: "Class.attribute", and the reason why the flag is no state of a machine.

Folders without flags have no entry.
"""


def _is_bool(value: ast.expr | None, flags: set[str]) -> bool:
    """Whether an expression is plainly a boolean: a constant, a comparison, a negation, or a name in `flags`."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, bool)
    if isinstance(value, ast.BoolOp):
        return all(_is_bool(one, flags) for one in value.values)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in {"bool", "any", "all", "isinstance"}
    negates = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return negates or isinstance(value, ast.Compare) or (isinstance(value, ast.Name) and value.id in flags)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for one, its in zip(target.elts, values, strict=True):
            yield from _pairs(one, its)
    else:
        yield target, value


def _flags_of(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and "bool" in ast.unparse(node.annotation).split(" | "):
            yield ast.unparse(node.target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = [*node.args.args, *node.args.kwonlyargs]
        flags = {one.arg for one in arguments if one.annotation is not None and ast.unparse(one.annotation) == "bool"}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                pairs = [pair for target in inner.targets for pair in _pairs(target, inner.value)]
            elif isinstance(inner, ast.AnnAssign):
                pairs = list(_pairs(inner.target, inner.value))
            else:
                continue
            for target, value in pairs:
                if isinstance(target, ast.Attribute) and _is_bool(value, flags) and ast.unparse(target.value) == "self":
                    yield target.attr


def _flags_in(room: str) -> set[str]:
    found: set[str] = set()
    for path in sorted((ROOT / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{flag}" for flag in _flags_of(node)}
    return found


def _rooms() -> set[str]:
    """Return every folder with code. `kvpipe` links to two top-level folders, which count as top-level folders."""
    folders = {path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")}
    return {one.relative_to(ROOT).as_posix() for one in folders if one.resolve() == one}


@pytest.mark.parametrize("room", sorted(_rooms() | set(FLAGS)))
def test_every_flag_has_a_reason(room: str) -> None:
    """`FLAGS` lists exactly the flags of the code, each with a reason. A flag that is not listed may be a state."""
    listed = FLAGS.get(room, {})
    assert _flags_in(room) == set(listed)
    assert all(listed.values())
