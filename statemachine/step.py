"""The step machine follows one rank's open step. The calls of vLLM's model runner are its events.

A call may be missing or repeated. The cell (IDLE, step_end) is a stay, because vLLM calls `wait_for_save` in every
step, even without a save, and perhaps twice. A repeated call of `wait_for_save` does not change how a job ends. A step
confirms a save if all layers were submitted, and confirms a sync load if attention has waited for all layers.

Two hooks are not events. `save_kv_layer` submits the copy of one layer once and changes no state. In every state,
`handle_preemptions` makes later writes wait for the last step's saves. A layer hook fires no event if the step copies
nothing, because vLLM calls these hooks for every layer of every step. A dummy run (warm-up, capture, an idle rank of
data parallelism) fires no event either: it binds no metadata, and vLLM's attention layers call no hook in a dummy run.
"""

from __future__ import annotations

from typing import Final

from kvpipe.statemachine.core import Machine, go, reject, stay

IDLE, OPEN, COMPUTING, GIVEN_UP, SETTLED, CLOSED = "IDLE", "OPEN", "COMPUTING", "GIVEN_UP", "SETTLED", "CLOSED"

BIND, PLAN, START_LOADS, WAIT_LAYER, TIME_OUT = "bind", "plan", "start_loads", "wait_layer", "time_out"
SETTLE, STEP_END, CLEAR, SHUTDOWN = "settle", "step_end", "clear", "shutdown"

_NO_READER: Final = reject("the step has no open load, and a hook without a load fires no event")
_FIRST: Final = reject("binding a step ends the step before")
_STARTED: Final = stay("a step's loads are started only once")

STEP: Final = Machine(
    name="step",
    prose="One rank's open step: its jobs, from the metadata that brings them to the end of the step.",
    initial=IDLE,
    finals=frozenset({CLOSED}),
    states={
        IDLE: "no step with jobs is open",
        OPEN: "jobs were planned; the loads among them were not started",
        COMPUTING: "sync loads were submitted: layers wait for them, compute, and are saved",
        GIVEN_UP: "a layer's sync load did not land in time: the step's loads and saves have failed",
        SETTLED: "loads are settled, and failed loads were reported to vLLM; saves may still be submitted",
        CLOSED: "the rank has shut down",
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
            SETTLE: stay("the step has no jobs, or has ended already"),
            STEP_END: stay("the call is repeated or extra, or the step has no jobs"),
            CLEAR: stay("the step has ended"),
            SHUTDOWN: go(CLOSED),
        },
        OPEN: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: go(COMPUTING),
            WAIT_LAYER: go(COMPUTING),
            TIME_OUT: reject("no hook waits for loads that were not started"),
            SETTLE: go(SETTLED),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        COMPUTING: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: _STARTED,
            WAIT_LAYER: stay("the step's loads were started already"),
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
            WAIT_LAYER: stay("after one timeout no further layer is waited for"),
            TIME_OUT: reject("after one timeout no hook waits any more"),
            SETTLE: go(SETTLED),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        SETTLED: {
            BIND: go(IDLE),
            PLAN: _FIRST,
            START_LOADS: stay("the loads are settled: sync loads have failed, async loads were started"),
            WAIT_LAYER: _NO_READER,
            TIME_OUT: _NO_READER,
            SETTLE: stay("the loads are settled already"),
            STEP_END: go(IDLE),
            CLEAR: go(IDLE),
            SHUTDOWN: go(CLOSED),
        },
        CLOSED: {
            **dict.fromkeys(
                (BIND, START_LOADS, SETTLE, STEP_END, CLEAR, SHUTDOWN),
                stay("the rank has shut down, so no step is open"),
            ),
            PLAN: reject("the rank refuses later plans before this event"),
            WAIT_LAYER: _NO_READER,
            TIME_OUT: _NO_READER,
        },
    },
)
