"""Hints: a request's statements about its own future. They come from outside, so they are checked and bounded.

A hint changes which chunks are evicted first, and which are fetched from tiers ahead of a request; nothing else. What
is ignored is counted, by reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpipe.cache.catalog import Catalog, Chunk
from kvpipe.cache.hints import Action, Hint
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.records import Tracked

ACTIONS_MAX: Final = 64
"""Of one request."""
FIELDS_MAX: Final = 16
"""Of one action's payload."""
TTL_S: Final = 300.0
"""How long chunks are retained by default, from the end of their request."""
TTL_S_MAX: Final = 24 * 3600.0
"""How long they are retained at most."""
RESUME_S_MAX: Final = 30 * 24 * 3600.0
VERSION: Final = "1"
"""Of actions that are known: what comes before the first point."""

Reason = Literal["action", "contradiction", "malformed", "payload", "policy", "repeated", "too_many", "version"]
REASONS: Final[Mapping[Reason, str]] = {
    "action": "an action that is none of those above",
    "contradiction": "`kv.demote` beside `kv.retain` or `kv.resume`: all of them are ignored",
    "malformed": "what should be an envelope, or an action, is none",
    "payload": "a field that is not known, is missing, has another type or is out of range",
    "policy": "the eviction policy takes no hints: of an engine with tiers `kv.resume` counts all the same, "
    "of another the request's hints are not looked at",
    "repeated": "a second action of the same kind: the first counts",
    "too_many": f"more than {ACTIONS_MAX} actions: none of them is looked at",
    "version": f"an `action_version` other than {VERSION}.x",
}
"""Why hints are ignored."""


class _Payload(BaseModel):
    """Fields that every payload may have. An unknown field is refused: it may change the meaning of the others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    execute_at: Literal["request_completion"] = "request_completion"
    include_current_request: Literal[True] = True
    block_hashes: Any = None
    """Not looked at: what is meant are the request's own chunks."""


class Retain(_Payload):
    """`priority`: 0 for what need not be kept; all others are equal."""

    ttl_seconds: float = Field(TTL_S, gt=0)
    priority: int = Field(1, ge=0)

    def wish(self) -> Wish:
        """Return what is wished for."""
        return Wish(Action.RETAIN, min(self.ttl_seconds, TTL_S_MAX)) if self.priority else Wish(Action.DEMOTE, 0.0)


class Demote(_Payload):
    """It has no fields of its own."""

    def wish(self) -> Wish:
        """Return what is wished for."""
        return Wish(Action.DEMOTE, 0.0)


class Resume(_Payload):
    """`after_seconds`: from the end of the request until another one begins with all of it."""

    after_seconds: float = Field(ge=0, le=RESUME_S_MAX)

    def wish(self) -> Wish:
        """Return what is wished for."""
        return Wish(Action.RESUME, self.after_seconds)


PREFIX: Final = "kv."
PAYLOADS: Final[Mapping[str, type[Retain | Demote | Resume]]] = {
    "kv.retain": Retain,
    "kv.resume": Resume,
    "kv.demote": Demote,
    "kv.evict": Demote,
    "kv.deref": Demote,
}
"""By action type."""


class Wish(NamedTuple):
    """A hint as a request states it: `in_s` seconds from the request's end."""

    action: Action
    in_s: float


class RawAction(NamedTuple):
    """An action that nobody has looked at. Each may be anything."""

    kind: object
    version: object
    payload: object


class RawHints(NamedTuple):
    """What came with a request, unread: an envelope's `actions`, and `own`: payloads by kind. None: it has none."""

    actions: object
    own: object


def read(raw: RawHints, ignore: Callable[[Reason], object]) -> tuple[Wish, ...]:
    """Return what is wished for. `ignore(reason)` is called for each action that is not, or for all at once."""
    wishes: dict[Action, Wish] = {}
    for one in _actions(raw, ignore):
        known = PAYLOADS.get(one.kind) if isinstance(one.kind, str) else None
        if known is None:
            ignore("action")
        elif not isinstance(one.version, str) or one.version.split(".", 1)[0] != VERSION:
            ignore("version")
        elif not isinstance(one.payload, Mapping) or len(one.payload) > FIELDS_MAX:
            ignore("payload")
        else:
            try:
                wish = known.model_validate(one.payload).wish()
            except (ValidationError, OverflowError):  # the latter: an integer that no float can hold
                ignore("payload")
                continue
            if wish.action in wishes:
                ignore("repeated")
            else:
                wishes[wish.action] = wish
    if Action.DEMOTE in wishes and len(wishes) > 1:
        for _ in wishes:
            ignore("contradiction")
        return ()
    return tuple(wishes.values())


def _actions(raw: RawHints, ignore: Callable[[Reason], object]) -> Iterable[RawAction]:
    """Return the actions that may be looked at, the envelope's first."""
    actions, own = raw.actions, raw.own
    if actions is not None and not isinstance(actions, list | tuple):
        ignore("malformed")
        actions = None
    if own is not None and not isinstance(own, Mapping):
        ignore("malformed")
        own = None
    if len(actions or ()) + len(own or ()) > ACTIONS_MAX:
        ignore("too_many")
        return ()
    enveloped = [one for one in actions or () if isinstance(one, RawAction)]
    for _ in range(len(actions or ()) - len(enveloped)):
        ignore("malformed")
    ours = [(PREFIX + kind if isinstance(kind, str) else kind, payload) for kind, payload in own.items()] if own else ()
    return itertools.chain(enveloped, (RawAction(kind, VERSION, payload) for kind, payload in ours))


class Hinting:
    """One per scheduler side. A request's hints are read once, and passed to the eviction policy.

    As its chunks land, so that what it saves takes no slot of what promises more, and for all of them when it is over.
    """

    def __init__(self, catalog: Catalog, counters: Counters, *, tiers: bool = False) -> None:
        """`counters`: of hints that are applied and of those that are ignored. `tiers`: whether there are any."""
        self._catalog, self._counters, self._tiers = catalog, counters, tiers

    def arrived(self, tracked: Tracked, raw: RawHints) -> None:
        """A request has come with hints."""
        takes = self._catalog.takes_hints
        if not (takes or self._tiers):
            self._ignore("policy")
            return
        wishes = read(raw, self._ignore)
        tracked.wishes = tuple(wish for wish in wishes if takes or wish.action is Action.RESUME)
        if takes:
            tracked.hints = self._from_now(tracked.wishes)
        for _ in range(len(wishes) - len(tracked.wishes)):
            self._ignore("policy")

    def _from_now(self, wishes: Iterable[Wish]) -> tuple[Hint, ...]:
        now_s = self._catalog.now_s
        return tuple(Hint(wish.action, now_s + wish.in_s) for wish in wishes)

    def _ignore(self, reason: Reason) -> None:
        self._counters.count("hints_ignored", reason)

    def ended(self, tracked: Tracked, chunks: Sequence[Chunk]) -> None:
        """A request with wishes is over. `chunks`: those it ends in, whole or not, then all, the last first."""
        if not self._catalog.takes_hints:
            return
        tracked.hints = self._from_now(tracked.wishes)
        for hint in tracked.hints:
            self._catalog.hint(chunks, hint)
            self._counters.count("hints_applied", hint.action.value)

    def landed(self, tracked: Tracked, chunk: Chunk) -> None:
        """A chunk of a request with hints has landed on every rank."""
        for hint in tracked.hints:
            self._catalog.hint((chunk,), hint)
