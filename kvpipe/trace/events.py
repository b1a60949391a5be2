"""The events of a trace, beside the moves of machines (`transitions.py`). Each is one line of JSON.

`event` is the event's name.

Times are nanoseconds: `t_ns` of the monotonic clock, which all processes of a host share, and `wall_ns` since the epoch
(1970). `rank` is -1 on the scheduler side. `engine` is the engine's id, `request` is vLLM's own request id: the two
link the events of one request from scheduler and ranks. `epoch` is the number of an admission, `step` that of the
scheduler's step.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import msgspec

FORMAT = 1
"""The number of the format. It is incremented when a reader of the former format would misread a line."""

SCHEDULER = -1
"""`rank` of the scheduler side."""

DEBUG, INFO, WARNING = logging.DEBUG, logging.INFO, logging.WARNING


class Event(msgspec.Struct, gc=False, tag_field="event", forbid_unknown_fields=True):
    """The fields of every event. `engine` and `wall_ns` are filled in by the writer."""

    level: ClassVar[int] = DEBUG
    throttled: ClassVar[bool] = False  # in the log, where it may come by the thousand

    t_ns: int
    rank: int
    request: str
    epoch: int
    step: int
    wall_ns: int = 0
    engine: str = ""


def tag_of(event: Event | type[Event]) -> str:
    """Return the name of this kind of event in traces."""
    return str(event.__struct_config__.tag)


# ---- the recorder itself --------------------------------------------------------------------------------------------


class Started(Event, tag="started"):
    """A process began to write a trace, or continued in a new file (`part` > 0).

    `side`: scheduler or worker; `layers`: of one rank; `sample` and `detail`: as configured.
    """

    format: int = FORMAT
    kvpipe: str = ""
    side: str = ""
    pid: int = 0
    layers: int = 0
    part: int = 0
    sample: float = 1.0
    detail: bool = True


class Ended(Event, tag="ended"):
    """A process ended normally. `dropped`: events that it had dropped."""

    dropped: int = 0


class Dropped(Event, tag="dropped"):
    """`count` events were lost here: the queue was full, or the file could not be written."""

    level = WARNING
    throttled = True
    count: int = 0
    why: str = ""


# ---- a request's life -----------------------------------------------------------------------------------------------


class RequestAdded(Event, tag="request_added"):
    """vLLM has a new request. `traceparent`: the W3C header it came with, if any."""

    prompt_tokens: int = 0
    traceparent: str = ""


class Lookup(Event, tag="lookup"):
    """A lookup's answer, if it differs from the last one for this request.

    `local_tokens`: held by vLLM; `hit_tokens`: beyond these, held by kvpipe, by tier; `missed_tokens`: held by neither,
    for the reason `why` (`kvpipe.cache.miss_reasons`). `later`: vLLM was asked to repeat the lookup.
    """

    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    later: bool = False


class RequestAdmitted(Event, tag="request_admitted"):
    """First admission: blocks are allocated. `waited_ms`: since the request was added; the rest as of `lookup`."""

    level = INFO
    prompt_tokens: int = 0
    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    load: str = ""
    waited_ms: float = 0.0


class RequestReadmitted(RequestAdmitted, tag="request_readmitted"):
    """A later admission, after a preemption or a failed load."""

    level = DEBUG


class RequestDone(Event, tag="request_done"):
    """The request is over; a summary. `status`: vLLM's.

    `loading_ms`: how long it waited for async loads; `saved_pages`: blocks of all groups that saves were planned for.
    """

    level = INFO
    status: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    loaded_tokens: int = 0
    saved_pages: int = 0
    preemptions: int = 0
    loads_failed: int = 0
    loading_ms: float = 0.0
    lived_ms: float = 0.0
    traceparent: str = ""


class LeasesTaken(Event, tag="leases_taken"):
    """An admission leases `chunks` chunks until its load ends."""

    chunks: int = 0


class LeasesReturned(Event, tag="leases_returned"):
    """An admission's leases have ended: its chunks can be evicted again."""

    chunks: int = 0


class LoadPlanned(Event, tag="load_planned"):
    """Job `job` will load `tokens` tokens: `pages` blocks of all groups. `kind`: load_sync or load_async."""

    job: int = 0
    kind: str = ""
    pages: int = 0
    tokens: int = 0


class SavePlanned(Event, tag="save_planned"):
    """Job `job` will save `pages` blocks of all groups."""

    job: int = 0
    pages: int = 0


# ---- a rank's steps and copies --------------------------------------------------------------------------------------


class StepRan(Event, tag="step_ran"):
    """A rank ran a step, from `t_ns` on for `took_ns`, with `jobs` jobs; for `waited_ns` it waited for copies."""

    took_ns: int = 0
    jobs: int = 0
    waited_ns: int = 0


class LayerSubmitted(Event, tag="layer_submitted"):
    """The copy of one layer of a step's jobs of one `kind` was handed to the transfer engine, which uses `mover`."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    mover: str = ""


class LayerCopied(Event, tag="layer_copied"):
    """A layer's copy has ended: submitted at `t_ns`; it took `took_ns`. `failed` names jobs."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    took_ns: int = 0
    failed: list[int] = []


class MoverMeasured(Event, tag="mover_measured"):
    """A mover was measured at start-up: time per submission, time per copy, and the rate without these."""

    level = INFO
    kind: str = ""
    mover: str = ""
    fixed_us: float = 0.0
    copy_us: float = 0.0
    gb_per_s: float = 0.0


class PoolReady(Event, tag="pool_ready"):
    """All of a rank's pool is resident, `took_ms` after that was begun."""

    level = INFO
    slots: int = 0
    gigabytes: float = 0.0
    took_ms: float = 0.0


class PoolShort(Event, tag="pool_short"):
    """There is no memory to spare for more of the pool than `ready` of its `slots`; that is tried again later.

    `free_mb`: megabytes left, by the limit that `where` names.
    """

    level = WARNING
    ready: int = 0
    slots: int = 0
    free_mb: float = 0.0
    where: str = ""
    remedy: str = ""


class ResumePrefetched(Event, tag="resume_prefetched"):
    """Before a request that `request` has announced, `tokens` tokens were fetched from tiers.

    It is announced for `left_ms` later; below 0, for earlier. `turn`: whether it is the first time, or the second.
    """

    tokens: int = 0
    left_ms: float = 0.0
    turn: int = 0


# ---- what an operator switches, and what goes wrong -----------------------------------------------------------------


class FreezeSwitched(Event, tag="freeze_switched"):
    """Saving was stopped (`on`), or resumed."""

    level = WARNING
    on: bool = False


class CacheReset(Event, tag="cache_reset"):
    """The cache was reset: every chunk was dropped."""

    level = WARNING
    chunks: int = 0


class TierSlow(Event, tag="tier_slow"):
    """A copy from or to a tier did not end within `waited_ms`; its jobs have failed."""

    level = WARNING
    throttled = True
    tier: str = ""
    waited_ms: float = 0.0


class TierLost(Event, tag="tier_lost"):
    """This rank can neither load nor save any more."""

    level = WARNING
    tier: str = ""
    why: str = ""


class TierLeft(Event, tag="tier_left"):
    """A tier has failed, and is not used until a probe succeeds. `use`: find, read or write."""

    level = WARNING
    tier: str = ""
    use: str = ""
    why: str = ""


class TierBack(TierLeft, tag="tier_back"):
    """A tier that was not used is used again."""

    level = INFO


class Stuck(Event, tag="stuck"):
    """A job made no progress for `waited_ms` and has failed. `last`: its last transitions."""

    level = WARNING
    throttled = True
    job: int = 0
    kind: str = ""
    waited_ms: float = 0.0
    last: list[str] = []


class Fault(Event, tag="fault"):
    """A failure that was contained. `name`: its counter, whose value is `seen`."""

    level = WARNING
    name: str = ""
    seen: int = 0
    fields: dict[str, str] = {}
