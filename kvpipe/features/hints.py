"""Hints are a client's statements about a prompt's future. Clients may be wrong, so hints are checked and bounded.

A hint changes only which chunks are evicted first, and which chunks are fetched from tiers ahead of a request. Ignored
hints are counted by reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.scheduler.events import Subscriber
from kvpipe.scheduler.wishes import RawAction, RawHints, Wish

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk, Piece
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.records import Tracked

ACTIONS_MAX: Final = 64
"""The largest number of actions of one request."""
FIELDS_MAX: Final = 16
"""The largest number of fields in one action's payload."""
TTL_S: Final = 300.0
"""The default time for which chunks are retained, in seconds from the end of their request."""
TTL_S_MAX: Final = 24 * 3600.0
"""The longest time for which chunks are retained, in seconds from the end of their request."""
RESUME_S_MAX: Final = 30 * 24 * 3600.0
VERSION: Final = "1"
"""The major version of known actions: the part of `action_version` before the first point."""

Reason = Literal["action", "contradiction", "malformed", "payload", "policy", "repeated", "too_many", "version"]
REASONS: Final[Mapping[Reason, str]] = {
    "action": "an action that is not in the list above",
    "contradiction": "`kv.demote` together with `kv.retain` or `kv.resume`: all of them are ignored",
    "malformed": "a value that is not an envelope or an action, although it stands in the place of one",
    "payload": "a field that is unknown or missing, has another type, or is out of range",
    "policy": "the eviction policy accepts no hints. An engine with tiers still applies `kv.resume`; an engine "
    "without tiers does not read the request's hints",
    "repeated": "a second action of the same kind: the first is applied",
    "too_many": f"more than {ACTIONS_MAX} actions: all of them are ignored",
    "version": f"an `action_version` other than {VERSION}.x",
}
"""The reasons for which hints are ignored, each with a description."""


class _Payload(BaseModel):
    """Fields that every payload may have.

    An unknown field is refused, because it may change the meaning of other fields.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    execute_at: Literal["request_completion"] = "request_completion"
    include_current_request: Literal[True] = True
    block_hashes: Any = None
    """Accepted but not used: the hint is about the request's own chunks."""


class Retain(_Payload):
    """The payload of a hint to keep chunks. `priority` 0 means that the chunks need not be kept.

    All other priorities have the same meaning.
    """

    ttl_seconds: float = Field(TTL_S, gt=0)
    priority: int = Field(1, ge=0)

    def wish(self) -> Wish:
        """Return the hint as a `Wish`."""
        return Wish(Action.RETAIN, min(self.ttl_seconds, TTL_S_MAX)) if self.priority else Wish(Action.DEMOTE, 0.0)


class Demote(_Payload):
    """The payload of a hint that chunks need not be kept. This payload has no fields of its own."""

    def wish(self) -> Wish:
        """Return the hint as a `Wish`."""
        return Wish(Action.DEMOTE, 0.0)


class Resume(_Payload):
    """The payload of a hint that another request will begin with all tokens of this request.

    `after_seconds` is the time from the end of this request to the other request.
    """

    after_seconds: float = Field(ge=0, le=RESUME_S_MAX)

    def wish(self) -> Wish:
        """Return the hint as a `Wish`."""
        return Wish(Action.RESUME, self.after_seconds)


PREFIX: Final = "kv."
PAYLOADS: Final[Mapping[str, type[Retain | Demote | Resume]]] = {
    "kv.retain": Retain,
    "kv.resume": Resume,
    "kv.demote": Demote,
    "kv.evict": Demote,
    "kv.deref": Demote,
}
"""The class of the payload, by action type."""


def read(raw: RawHints, ignore: Callable[[Reason], object]) -> tuple[Wish, ...]:
    """Return the valid hints as wishes. `ignore(reason)` is called for each invalid action, and once for too many."""
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
            except (ValidationError, OverflowError):  # `OverflowError`: an integer that no float can hold
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
    """Return the actions to check, the actions of the envelope first."""
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


class Hinting(Subscriber):
    """Reads the hints of each request once, and passes them to the eviction policy.

    When a chunk lands, the hints on this chunk are passed, so that the policy can rank the chunk at once. When the
    request ends, its hints are passed again for all its chunks.
    """

    def __init__(self, context: Context, *, tiers: bool = False) -> None:
        """Start without requests. `tiers` says whether the engine has tiers."""
        self._context, self._tiers = context, tiers

    def arrived(self, tracked: Tracked, hints: RawHints | None) -> None:
        """Read the hints of a request that has arrived."""
        if hints is None:
            return
        takes = self._context.catalog.takes_hints
        if not (takes or self._tiers):
            self._ignore("policy")
            return
        wishes = read(hints, self._ignore)
        tracked.wishes = tuple(wish for wish in wishes if takes or wish.action is Action.RESUME)
        if takes:
            tracked.hints = self._from_now(tracked.wishes)
        for _ in range(len(wishes) - len(tracked.wishes)):
            self._ignore("policy")

    def _from_now(self, wishes: Iterable[Wish]) -> tuple[Hint, ...]:
        now_s = self._context.catalog.now_s
        return tuple(Hint(wish.action, now_s + wish.in_s) for wish in wishes)

    def _ignore(self, reason: Reason) -> None:
        self._context.counters.count("hints_ignored", reason)

    def finished(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:
        """Pass the request's hints to the policy, for all its chunks in memory. `chunks` has the last chunk first."""
        if not (tracked.wishes and self._context.catalog.takes_hints):
            return
        tracked.hints = self._from_now(tracked.wishes)
        for hint in tracked.hints:
            self._context.catalog.hint([*chunks], hint)
            self._context.counters.count("hints_applied", hint.action.value)

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """Pass the hints of the request on a piece that has landed on every rank."""
        for hint in tracked.hints:
            self._context.catalog.hint((piece.chunk,), hint)
