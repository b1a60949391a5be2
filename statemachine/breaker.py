"""The breaker machine: whether one process uses one tier for one purpose (finding, reading, writing).

A tier that fails is not called any more, so that a dead server costs a few calls and not one per request. A probe in
the background calls it from time to time. After a probe that succeeds, one success closes the breaker, and one failure
opens it again.
"""

from __future__ import annotations

from kvpipe.statemachine.core import Machine, go, reject, stay

CLOSED, OPEN, HALF_OPEN = "CLOSED", "OPEN", "HALF_OPEN"

OK, FAULT, FAULT_LAST, PROBE_OK, PROBE_FAILED = "ok", "fault", "fault_last", "probe_ok", "probe_failed"

_NOT_PROBED = "only an open breaker is probed"

BREAKER = Machine(
    name="breaker",
    prose="One tier, as one process uses it for one purpose: to find, to read or to write.",
    initial=CLOSED,
    finals=frozenset(),
    states={
        CLOSED: "the tier is used",
        OPEN: "the tier is not used: what it holds is a miss, what should go there is dropped",
        HALF_OPEN: "a probe has succeeded: the tier is used, and the next call closes or opens the breaker",
    },
    events={
        OK: "a call ended well",
        FAULT: "a call failed; fewer in a row have failed than open the breaker",
        FAULT_LAST: "a call failed, and as many in a row have as open the breaker, or it took too long",
        PROBE_OK: "a probe succeeded: the tier can be used",
        PROBE_FAILED: "the tier cannot be used yet",
    },
    table={
        CLOSED: {
            OK: reject("a call that ends as it should is no event"),
            FAULT: stay("one failure is no outage"),
            FAULT_LAST: go(OPEN),
            PROBE_OK: reject(_NOT_PROBED),
            PROBE_FAILED: reject(_NOT_PROBED),
        },
        OPEN: {
            OK: stay("a call from before the outage; the probe decides"),
            FAULT: stay("a call from before the outage"),
            FAULT_LAST: stay("a call from before the outage"),
            PROBE_OK: go(HALF_OPEN),
            PROBE_FAILED: stay("asked again later"),
        },
        HALF_OPEN: {
            OK: go(CLOSED),
            FAULT: go(OPEN),
            FAULT_LAST: go(OPEN),
            PROBE_OK: reject(_NOT_PROBED),
            PROBE_FAILED: reject(_NOT_PROBED),
        },
    },
)
