"""States lie in the machines: every boolean attribute of every room's classes is listed with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TOPS = ("statemachine", "kvpipe", "connectors")

OF_A_SHAPE = """
    answers asynchronous branches deferred dense device drafter events failing fails fresh graphs hints operators
    priorities quotas resumes sibling slow undropped unmet v2 warms
"""

FLAGS: dict[str, dict[str, str]] = {
    "statemachine": {
        "Edge.moves": "content of a table",
        "Edge.rejects": "content of a table",
        "State.final": "content of a table",
    },
    "kvpipe": {
        "Geometry.branches_within": "configuration",
        "Group.local": "content: a kind of attention",
        "Group.state": "content: a kind of cache",
        "LoopThread._awake": "of its inbox: somebody has rung, or it is being emptied, so that nobody rings again",
        "LoopThread._stopping": "a latch: its inbox takes nothing any more",
        "OperatorSocket._bound": "of a file: it is this socket's, and deleted with it",
        "Outcome.ok": "content of a report",
        "Reading.settled": "content of an answer",
        "Report.lost": "content of a report",
        "Settings.bypass": "configuration",
        "Settings.freeze": "configuration",
        "Settings.learn_answers": "configuration",
        "Settings.log_requests": "configuration",
        "Settings.otel": "configuration",
        "Settings.save_decode": "configuration",
        "Settings.save_partial": "configuration",
        "StepPlan.computes": "content of a plan",
        "TierOrder.stores": "content of an order: a direction",
    },
    "kvpipe/trace": {
        "FileSink._regular": "content: what kind of file the system has opened",
        "FreezeSwitched.on": "content of an event",
        "Life.done": "content of a trace: it has the event that sums a request up",
        "Life.finished": "content of a trace: it has the last move of a request's machine, which not every trace has",
        "Life.whole": "content of a trace: it has a request's first event",
        "Lookup.later": "content of an event",
        "LogSink._requests": "configuration",
        "Recorder.detail": "configuration",
        "Recorder.lifecycle": "configuration",
        "Recorder.transitions": "configuration",
        "Span.is_open": "content of a trace: it has no end of the span",
        "Started.detail": "content of an event",
    },
    "kvpipe/scheduler": {
        "Hinting._tiers": "configuration",
        "Stage.announced": "content: whether a hint has announced a request, or an operator warms the prompt",
        "Stage.slow": "content of an answer: whether it names a tier that is slower than the engine",
        "LookupResult.later": "content of an answer; the lookup machine has the state that follows",
        "Hit.waits": "content of an answer",
        "Asking.waits": "content of an answer",
        "Order.always": "content: whether it is taken when the others have no room",
        "Order.failed": "content of an answer",
        "Answer.looked_up": "a latch: its prompt's first lookup has been learned from",
        "Order.over": "a latch: written last, by whoever carries it out; the other thread reads the answer behind it",
        "Orders._ended": "a latch: the engine is over",
        "Pin.over": "a latch: its leases are being given back, some at a time",
        "Prefetch.over": "a latch: nothing more comes of it; the stage machine has the state, from its turn on",
        "RequestContext.sampled": "configuration, by request: whether it is traced",
        "Saving._uncut": "configuration",
        "Staging._consumes": "configuration",
        "Storing._rested": "what waits was counted for this idle stretch",
        "Switches.loads": "configuration",
        "Switches.saves": "configuration",
        "Switches.tier_lost": "a latch: reported once by a rank, never taken back",
        "Turns._wanted": "of a lock: who waits for it, so that nobody begins another slice",
        "Turns.away": "of a lock: that the engine has given it away, read without taking it",
        "Use.torn": "a latch: the adapter's bytes changed under a request, until they are known anew",
        "Use.waits": "the answer of this step, so that it is the same when asked again in it",
        "Weights.awaited": "a latch: ranks introduce themselves with a step, and have not yet",
        "Weights._known": "a latch: ranks have reported which weights they have, if only that they do not know",
    },
    "kvpipe/cache": {
        "Mark.keep": "content: whether later ends of the chunk leave the mark",
        "Piece.keep": "content: whether it leaves such a mark",
        "Prefixes._partial": "configuration: whether a group needs less than the whole prefix",
        "Turn.over": "content: what a policy learns of the calls that follow",
    },
    "kvpipe/cache/policy": {
        "Chain.orphan": "content: it follows what is not there",
        "Chain.shared": "a latch: prompts have gone on differently behind it",
        "Duel._believed": "a verdict: clients' hints are followed, until LRU is proven to hit more",
        "Duel._hinted": "a latch: a client has given a hint",
        "Duel.learnt": "a verdict: which of two orders evicts; a function of counts, with hysteresis",
        "Sessions._bare": "of the chain that is drained: nothing has come behind it since it was looked at",
        "Sessions._over": "content of the last `request`: whether the calls that follow are of a request's end",
    },
    "kvpipe/tiers": {
        "Carried.ok": "content of a report",
        "ClientChannel._cancels": "configuration: whether a call can be taken back",
        "ClientChannel.owed": "of memory: a client that nobody waits for any more may still write to it",
        "ClientTier._opened": "what was asked for: a client that has ended is started anew only then",
        "FirstHash._leaves": "configuration: rank 0 does",
        "Pool._shut": "a latch: nobody gets a lane any more",
        "TierLookup.done": "a latch: written last, by the other thread; the answer is behind it",
        "TierLookup.down": "content of an answer",
        "TierLookup.survey": "content: whether no request waits for it",
        "TierThread._over": "a latch: no work begins any more",
    },
    "kvpipe/transfer": {
        "CpuEngine._closed": "a latch: no copy begins any more",
        "CudaEngine._closed": "a latch: its completion thread ends",
        "CudaEngine._lost": "a latch: the device's context is dead",
        "EngineOptions.idle_core": "configuration",
        "GuardedEngine._lost": "a latch: the engine has raised, and is asked to copy no more",
        "HostPool.huge_pages": "content: what the system has given",
        "Launch.saving": "content: a direction",
        "Pins._ended": "a latch: nothing is pinned any more",
        "Pins._refused": "of the last call alone: so that a refusal is reported once",
        "Readier._is_short": "of the last look alone: so that want of memory is reported once",
        "Readier._touches": "configuration: whether memory is taken before it is used",
        "SlotSpan.adjacent": "content: how blocks lie",
        "_Queue.lazy": "content of a plan: each of its layers has a reader",
        "_Queue.patient": "content of a plan: nobody waits for it",
        "_WaveInFlight.last": "content of a plan: no wave of it follows",
    },
    "kvpipe/tiers/disk": {
        "DiskRoom._sync": "configuration",
        "DiskSpec.fsync": "configuration",
        "DiskTier._looks": "of a thread that lists the folder: whether it is under way, so that none begins beside it",
        "DiskTier._makes": "configuration: whether a folder that is not there is made",
        "DiskTier._open": "what was asked for: calls before `open` and after `close` are refused",
        "DiskTier._writes": "configuration",
        "DiskTier._yields": "a latch: that others fill the disk has been logged",
        "Index._passing": "of a lock: a pass lists files; what is added meanwhile is not taken for gone",
        "ValueFiles._direct": "a latch: the file system has refused direct I/O",
        "ValueFiles._must": "configuration",
    },
    "kvpipe/tiers/redis": {
        "RedisSpec.cluster": "configuration",
        "RedisSpec.tls": "configuration",
        "Server._closed": "a latch: no connection is made any more",
        "ServerConnection._stopped": "a latch: whoever asked is gone, and redis-py tries no more",
    },
    "kvpipe/tiers/s3": {
        "Client._conditional": "a latch: the store cannot leave an object that is there as it is",
        "S3Spec.allow_http": "configuration",
        "S3Tier._opened": "what was asked for: a client that has ended is started anew only then",
        "S3Tier._writes": "configuration",
        "StoreError.full": "content of an answer",
    },
    "kvpipe/tiers/mooncake": {
        "MooncakeTier._opened": "what was asked for: a client that has ended is started anew only then",
        "MooncakeTier._writes": "configuration",
        "Worker.lends": "configuration",
    },
    "kvpipe/manage": {
        "BoundedConnection.access_log": "configuration, of the HTTP server",
        "EngineState.saving": "content of an answer",
        "EvictMatching.all": "content of an order",
        "EvictMatching.no_adapter": "content of an order",
        "EvictMatching.no_salt": "content of an order",
        "HashedPrompt.unknown": "content of an order: nothing is known of its adapter",
        "Pending.pending": "content of an answer, so that clients can recognize it",
        "PromptLookup.tiers": "content of a question",
        "RequestHolds.waits_for_tiers": "content of an answer",
        "SetSwitches.bypass": "content of an order",
        "SetSwitches.freeze": "content of an order",
        "SwitchStates.bypass": "content of an answer",
        "SwitchStates.freeze": "content of an answer",
        "TierState.left_by_ranks": "content of an answer",
        "TierState.slow": "content of an answer",
    },
    "kvpipe/worker": {
        "Batch.closed": "no copy will be added; jobs may have failed before, so no cursor shows it",
        "Batch.stuck": "no copy is begun any more; its jobs have failed, as have those of batches still copied",
        "Batch.traced": "configuration: some job of it is traced in detail",
        "Hooks.fences_late": "configuration: who calls `fence`",
        "LoadRate._wave_counts": "of a wave that lands: queued before the last landing or not, no machine's business",
        "Pipeline._computes": "of the open step: what the scheduler planned for it, before any hook can",
        "Pipeline._fences_late": "configuration: who calls `fence`",
        "WorkerSide.lost": "a latch: this rank's tier is reported as lost once, and for ever",
    },
    "kvpipe/testing": {
        "Browser._dark": "configuration",
        "FakeDevice.interpreted": "configuration",
        "FakeEngine.finishes_at_shutdown": "configuration",
        "FakeEvent.broken": "of the simulated device: CUDA's own",
        "FakeEvent.fired": "of the simulated device: CUDA's own",
        "HeldEngine._backwards": "configuration",
        "HeldEngine._device": "configuration",
        "HeldTier.is_held": "what a test asks for: its calls wait",
    },
    "kvpipe/testing/servers": {
        "Proxy.stalled": "what a test asks for: nothing passes",
    },
    "connectors/vllm": {
        "KVPipeConnector._introduced": "a latch: the rank's introduction was sent",
        "PromptBlocks._adapters": "configuration",
        "_Observed.failed": "a latch: a tensor was not loaded as it was given",
        "_Observed.whole": "content of a report",
    },
    "connectors/vllm/remedies": {
        "Encoded._adapts": "configuration",
        "Encoded._held": "of vLLM's cache: whether anything may be in it",
        "Encoded.old": "of vLLM's cache: whether anything in it may be of weights that are gone",
    },
    "connectors/vllm/trial": {
        "Case.careful": "configuration",
        "Invariant.outside": "content: whether it holds for any connector",
        "Live.aborted": "what the trial has done: its answer may be shorter",
        "Live.closed": "what the trial has done: no input of its session follows",
        "Plan.caches_prefixes": "content: whether vLLM would cache prefixes itself",
        "Rank._drafts": "configuration: whether it is of the last stage",
        "TableEntry.is_null": "content: vLLM's block that stands for none",
        "Steps._pickles": "configuration, by seed",
        "Disturbances._reversed": "a latch, of `Steps`: copies have been completed in another order",
        "Steps._reversed": "a latch: copies have been completed in another order",
        "Steps._throttled": "vLLM's own: whether it is asked to put prefills off",
        "Trial.is_down": "a latch: no move is made any more",
        **dict.fromkeys((f"Shape.{one}" for one in OF_A_SHAPE.split()), "configuration"),
    },
}
"""By room: "Class.attribute", and why it is no state of a machine. A room without flags needs no entry."""


def _is_bool(value: ast.expr | None, flags: set[str]) -> bool:
    """Whether an expression is plainly a boolean: a constant, a comparison, a negation, or one of the `flags`."""
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
    """Every folder with code. `kvpipe` links to two of the tops: what is under a link is itself a top."""
    folders = {path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")}
    return {one.relative_to(ROOT).as_posix() for one in folders if one.resolve() == one}


@pytest.mark.parametrize("room", sorted(_rooms() | set(FLAGS)))
def test_every_flag_has_a_reason(room: str) -> None:
    """What is not listed is new: is it a state? What is listed and not there is stale."""
    listed = FLAGS.get(room, {})
    assert _flags_in(room) == set(listed)
    assert all(listed.values())
