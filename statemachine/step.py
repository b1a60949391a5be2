"""The step machine: one rank's open step, moved by the calls of vLLM's runner, any of which may be missing or repeated.

``IDLE x step_end`` is a stay: vLLM calls `wait_for_save` in every step, also without anything to save, and perhaps
twice. A job does not end after a number of calls: it ends when all layers were submitted, or waited for by attention.

Two hooks are not events. `save_kv_layer` changes no state: it submits the copy of one layer, once. `handle_preemptions`
orders writes after the last step's saves, in every state. Layer hooks without anything to copy fire no event, because
vLLM calls them for every layer of every step. A dummy run (warm-up, capture, an idle rank of data parallelism) is no
event either: no metadata is bound, and vLLM's attention layers call no hook.
"""

from __future__ import annotations

from typing import Final

from kvpipe.statemachine.core import Machine, go, reject, stay

IDLE, OPEN, COMPUTING, GIVEN_UP, SETTLED, CLOSED = "IDLE", "OPEN", "COMPUTING", "GIVEN_UP", "SETTLED", "CLOSED"

BIND, PLAN, START_LOADS, WAIT_LAYER, TIME_OUT = "bind", "plan", "start_loads", "wait_layer", "time_out"
SETTLE, STEP_END, CLEAR, SHUTDOWN = "settle", "step_end", "clear", "shutdown"

_NO_READER: Final = reject("no load of the step is open, and a hook without a load is not fired")
_FIRST: Final = reject("binding the step has ended the one before")
_STARTED: Final = stay("loads are started once")

STEP: Final = Machine(
    name="step",
    prose="One rank's open step: its jobs, from the metadata that brings them to the end of the step.",
    initial=IDLE,
    finals=frozenset({CLOSED}),
    states={
        IDLE: "no step with jobs is open",
        OPEN: "jobs were planned; their loads were not started",
        COMPUTING: "sync loads were submitted: layers wait for them, compute, and are saved",
        GIVEN_UP: "a layer's sync load did not land in time: the step's loads and saves have failed",
        SETTLED: "loads are settled: those that failed were reported to vLLM; saves may still be submitted",
        CLOSED: "shut down",
    },
    events={
        BIND: "the step's metadata is bound (`bind_connector_metadata`)",
        PLAN: "the metadata has jobs",
        START_LOADS: "the step's loads may start (`start_load_kv`, before the forward or after it)",
        WAIT_LAYER: "attention is about to read a layer of a sync load (`wait_for_layer_load`)",
        TIME_OUT: "a layer's load did not land within `wait_ms_max`",
        SETTLE: "vLLM collects the step's results (`get_transfer_results`, `get_finished`)",
        STEP_END: "the step's saves are ended (`wait_for_save`)",
        CLEAR: "the step's metadata is cleared (`clear_connector_metadata`)",
        SHUTDOWN: "the rank shuts down",
    },
    table={
        IDLE: {
            BIND: stay("the step before has ended"),
            PLAN: go(OPEN),
            START_LOADS: stay("the step has no jobs"),
            WAIT_LAYER: _NO_READER,
            TIME_OUT: _NO_READER,
            SETTLE: stay("the step has no jobs, or has ended"),
            STEP_END: stay("repeated, empty or extra"),
            CLEAR: stay("the step has ended"),
            SHUTDOWN: go(CLOSED),
        },
        OPEN: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: go(COMPUTING),
            WAIT_LAYER: go(COMPUTING),
            TIME_OUT: reject("nobody waits for loads that were not started"),
            SETTLE: go(SETTLED),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        COMPUTING: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: _STARTED,
            WAIT_LAYER: stay("its loads were started"),
            TIME_OUT: go(GIVEN_UP),
            SETTLE: go(SETTLED),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        GIVEN_UP: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: _STARTED,
            WAIT_LAYER: stay("one wait in vain is enough"),
            TIME_OUT: reject("nobody waits any more"),
            SETTLE: go(SETTLED),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        SETTLED: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: stay("settled: sync loads have failed, async ones were started"),
            WAIT_LAYER: _NO_READER,
            TIME_OUT: _NO_READER,
            SETTLE: stay("settled once"),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        CLOSED: {
            **dict.fromkeys((BIND, START_LOADS, SETTLE, STEP_END, CLEAR, SHUTDOWN), stay("nothing is open any more")),
            PLAN: reject("the jobs of later plans are refused before"),
            WAIT_LAYER: _NO_READER,
            TIME_OUT: _NO_READER,
        },
    },
)
