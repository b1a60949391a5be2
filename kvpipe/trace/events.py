"""The events of a trace, except the moves of machines (`transitions.py`). Each event is one line of JSON.

`event` is the event's name.

Times are in nanoseconds. `t_ns` is the time of the monotonic clock, which all processes of a host share. `wall_ns` is
the time since the epoch (1970). `rank` is -1 on the scheduler side. `engine` is the engine's id, and `request` is
vLLM's own request id. These two ids link the events of one request from the scheduler and the ranks. `epoch` is the
number of an admission, and `step` is the number of the scheduler's step.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import msgspec

FORMAT = 1
"""The number of the trace format. It is incremented when a reader of the old format would misread a line."""

SCHEDULER = -1
"""The value of `rank` on the scheduler side."""

DEBUG, INFO, WARNING = logging.DEBUG, logging.INFO, logging.WARNING


class Event(msgspec.Struct, gc=False, tag_field="event", forbid_unknown_fields=True):
    """The fields of every event. The writer fills in `engine` and `wall_ns`."""

    level: ClassVar[int] = DEBUG
    throttled: ClassVar[bool] = False  # whether only one in a thousand of these events is logged

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

    `side` is scheduler or worker. `layers` is the number of layers of one rank. `sample` and `detail` are settings.
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
    """A process ended normally. `dropped` is the number of events that the process has dropped."""

    dropped: int = 0


class Dropped(Event, tag="dropped"):
    """`count` events are missing at this place of the trace: the queue was full, or the file could not be written."""

    level = WARNING
    throttled = True
    count: int = 0
    why: str = ""


# ---- a request's life -----------------------------------------------------------------------------------------------


class RequestAdded(Event, tag="request_added"):
    """vLLM has a new request. `traceparent` is the W3C header of the request, if any."""

    prompt_tokens: int = 0
    traceparent: str = ""


class Lookup(Event, tag="lookup"):
    """A lookup has an answer that differs from the last answer for this request.

    vLLM holds the first `local_tokens` tokens. kvpipe holds the next tokens, which `hit_tokens` counts by tier. Neither
    vLLM nor kvpipe holds the last `missed_tokens` tokens, for the reason `why` (`kvpipe.trace.miss_reasons`). `later`
    says whether vLLM was asked to repeat the lookup.
    """

    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    later: bool = False


class RequestAdmitted(Event, tag="request_admitted"):
    """A request is first admitted, `waited_ms` after it was added. The event `lookup` explains the other fields."""

    level = INFO
    prompt_tokens: int = 0
    local_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    missed_tokens: int = 0
    why: str = ""
    load: str = ""
    waited_ms: float = 0.0


class RequestReadmitted(RequestAdmitted, tag="request_readmitted"):
    """A request is admitted again, after a preemption or a failed load."""

    level = DEBUG


class RequestDone(Event, tag="request_done"):
    """The request is over. The fields summarise its life. `status` is vLLM's status of the request.

    `loading_ms` is the time for which the request waited for async loads. `saved_pages` is the number of blocks of all
    groups for which saves were planned.
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
    """The leases of an admission have ended, so that its chunks can be evicted again."""

    chunks: int = 0


class LoadPlanned(Event, tag="load_planned"):
    """Job `job` will load `tokens` tokens, which are `pages` blocks of all groups together.

    `kind` is load_sync or load_async.
    """

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
    """A rank ran a step with `jobs` jobs, for `took_ns` from `t_ns` on. For `waited_ns` the rank waited for copies."""

    took_ns: int = 0
    jobs: int = 0
    waited_ns: int = 0


class LayerSubmitted(Event, tag="layer_submitted"):
    """A rank submitted one layer of a step's jobs of one `kind` to the transfer engine, which copies with `mover`."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    mover: str = ""


class LayerCopied(Event, tag="layer_copied"):
    """A layer's copy, which was submitted at `t_ns`, ended after `took_ns`. `failed` has the ids of the failed jobs."""

    kind: str = ""
    layer: int = 0
    jobs: list[int] = []
    took_ns: int = 0
    failed: list[int] = []


class MoverMeasured(Event, tag="mover_measured"):
    """A mover was measured at start-up: the time per submission and per copy, and the rate without these times."""

    level = INFO
    kind: str = ""
    mover: str = ""
    fixed_us: float = 0.0
    copy_us: float = 0.0
    gb_per_s: float = 0.0


class PoolReady(Event, tag="pool_ready"):
    """The whole pool of a rank is resident. Making the pool resident took `took_ms`."""

    level = INFO
    slots: int = 0
    gigabytes: float = 0.0
    took_ms: float = 0.0


class PoolShort(Event, tag="pool_short"):
    """Memory is free for only `ready` of the pool's `slots`. The rank tries again later.

    `free_mb` is the free memory in megabytes, by the limit that `where` names.
    """

    level = WARNING
    ready: int = 0
    slots: int = 0
    free_mb: float = 0.0
    where: str = ""
    remedy: str = ""


class ResumePrefetched(Event, tag="resume_prefetched"):
    """`request` has announced a next request, for which `tokens` tokens were fetched from tiers in advance.

    The next request is announced for `left_ms` after this event. A negative `left_ms` is a time before this event.
    `turn` is the number of the fetch for this announcement, from 1 on.
    """

    tokens: int = 0
    left_ms: float = 0.0
    turn: int = 0


class TierBlockAnnounced(Event, tag="tier_block_announced"):
    """Routers were notified that all ranks have a chunk of `units` units in a tier."""

    tier: str = ""
    group: int = 0
    units: int = 0


class TierBlocksWithdrawn(Event, tag="tier_blocks_withdrawn"):
    """Routers were notified that a tier does not have `blocks` chunks any more.

    `why` is the reason: `missed` by a lookup, `noticed` by the tier, `no_room` for more known chunks, or `reset`.
    """

    tier: str = ""
    group: int = 0
    blocks: int = 0
    why: str = ""


# ---- switches and failures ------------------------------------------------------------------------------------------


class FreezeSwitched(Event, tag="freeze_switched"):
    """Saving was stopped (`on`), or resumed."""

    level = WARNING
    on: bool = False


class CacheReset(Event, tag="cache_reset"):
    """The cache was reset, which dropped every chunk."""

    level = WARNING
    chunks: int = 0


class TierSlow(Event, tag="tier_slow"):
    """A copy from or to a tier did not end within `waited_ms`, so that the copy's jobs have failed."""

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
    """A tier has failed, and is not used for `use` (find, read or write) until a probe succeeds."""

    level = WARNING
    tier: str = ""
    use: str = ""
    why: str = ""


class TierBack(TierLeft, tag="tier_back"):
    """A tier that was not used is used again."""

    level = INFO


class Stuck(Event, tag="stuck"):
    """A job made no progress for `waited_ms` and has failed. `last` has the job's last transitions."""

    level = WARNING
    throttled = True
    job: int = 0
    kind: str = ""
    waited_ms: float = 0.0
    last: list[str] = []


class Fault(Event, tag="fault"):
    """A failure was contained. `name` is the failure's counter, and `seen` is the counter's value."""

    level = WARNING
    name: str = ""
    seen: int = 0
    fields: dict[str, str] = {}
