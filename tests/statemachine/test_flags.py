"""States lie in the machines: every boolean attribute of a room's classes is listed with its reason.

Those of `kvpipe/worker` are in `tests/worker/test_threads.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLAGS: dict[str, dict[str, str]] = {
    "kvpipe/scheduler": {
        "Hinting._tiers": "configuration",
        "Stage.announced": "content: whether a hint has announced a request, or an operator warms the prompt",
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
        "Switches.loads": "configuration",
        "Switches.saves": "configuration",
        "Switches.tier_lost": "a latch: reported once by a rank, never taken back",
        "Turns._wanted": "of a lock: who waits for it, so that nobody begins another slice",
        "Turns.away": "of a lock: that the engine has given it away, read without taking it",
        "Use.torn": "a latch: the adapter's bytes changed under a request, until they are known anew",
        "Use.waits": "the answer of this step, so that it is the same when asked again in it",
        "Weights._known": "a latch: ranks have told which weights they have, if only that they cannot say",
    },
    "kvpipe/cache": {
        "Mark.keep": "content: whether later ends of the chunk leave the mark",
        "Piece.keep": "content: whether it leaves such a mark",
        "Prefixes._partial": "configuration: whether a group needs less than the whole prefix",
        "Turn.over": "content: what a policy is told of the calls that follow",
    },
    "kvpipe/tiers": {
        "Carried.ok": "content of a report",
        "ClientChannel._cancels": "configuration: whether a call can be taken back",
        "ClientChannel.owed": "of memory: a client that nobody waits for any more may still write to it",
        "ClientTier._opened": "what was asked for: a client that has ended is started anew only then",
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
        "S3Tier._writes": "configuration",
        "StoreError.full": "content of an answer",
    },
    "kvpipe/tiers/mooncake": {
        "MooncakeTier._writes": "configuration",
        "Worker.lends": "configuration",
    },
    "connectors/vllm": {
        "PromptBlocks._adapters": "configuration",
        "_Observed.failed": "a latch: a tensor was not loaded as it was given",
        "_Observed.whole": "content of a report",
    },
    "connectors/vllm/remedies": {
        "Encoded._adapts": "configuration",
        "Encoded._held": "of vLLM's cache: whether anything may be in it",
        "Encoded.old": "of vLLM's cache: whether anything in it may be of weights that are gone",
    },
}
"""By room: "Class.attribute", and why it is no state of a machine."""


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
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "bool":
            yield ast.unparse(node.target)
        if not isinstance(node, ast.FunctionDef):
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


@pytest.mark.parametrize("room", FLAGS)
def test_every_flag_has_a_reason(room: str) -> None:
    """What is not listed is new: is it a state? What is listed and not there is stale."""
    assert _flags_in(room) == set(FLAGS[room])
    assert all(FLAGS[room].values())
