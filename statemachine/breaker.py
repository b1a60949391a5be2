"""The breaker machine decides whether one process uses one tier for one purpose (finding, reading, writing).

The process stops calling a tier that fails, so that only a few requests wait for a dead server. A probe in the
background calls the tier from time to time. After a successful probe, the next call decides: if it succeeds, the
breaker is closed, and if it fails, the breaker opens again.
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
        OPEN: "the tier is not used: its values are misses, and stores into it are dropped",
        HALF_OPEN: "a probe has succeeded: the tier is used, and the result of the next call closes or opens the "
        "breaker",
    },
    events={
        OK: "a call succeeded",
        FAULT: "a call failed, but there were fewer failures in a row than open the breaker",
        FAULT_LAST: "a call failed as the last of the failures in a row that open the breaker, or took too long",
        PROBE_OK: "a probe succeeded: the tier can be used",
        PROBE_FAILED: "a probe failed: the tier cannot be used yet",
    },
    table={
        CLOSED: {
            OK: reject("a successful call fires no event while the breaker is closed"),
            FAULT: stay("one failure is no outage"),
            FAULT_LAST: go(OPEN),
            PROBE_OK: reject(_NOT_PROBED),
            PROBE_FAILED: reject(_NOT_PROBED),
        },
        OPEN: {
            OK: stay("the call began before the outage; only a probe closes the breaker"),
            FAULT: stay("the call began before the outage"),
            FAULT_LAST: stay("the call began before the outage"),
            PROBE_OK: go(HALF_OPEN),
            PROBE_FAILED: stay("the tier is probed again later"),
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
