"""What the engine scenarios share: prompts, a baseline engine, and what must hold after every one of them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.configurations import CONFIGURATIONS, make_configuration
from kvpipe.testing.models import VOCAB, make_model
from kvpipe.testing.waiting import PATIENT, PATIENT_MS, WAIT_S, eventually
from kvpipe.trace.reader import Trace, files_of
from kvpipe.trace.replay import replay
from kvpipe.worker.side import WorkerSide

UNEXPECTED = (
    "contained_error",
    "illegal_transition",
    "copy_timeout",
    "loop_did_not_settle",
    "loop_lost",
    "hook_for_unknown_layer",
    "layers_never_submitted",
    "layers_read_without_waiting",
    "loads_never_started",
    "step_never_ended",
    "step_end_skipped",
    "poisoned_plan",
    "hit_vanished",
    "admitted_without_lookup",
    "id_reused_before_finish",
    "scheduled_unknown_request",
    "foreign_metadata",
)

WAITS = (
    "kvpipe.scheduler.fetches.PATIENCE_S",
    "kvpipe.tiers.carrier.DRAIN_S_MAX",
    "kvpipe.trace.recorder.CLOSE_S_MAX",
    "kvpipe.trace.recorder._LOCK_S_MAX",
    "kvpipe.manage.engine.WAIT_S_MAX",
    "kvpipe.manage.survey.SURVEY_S_MAX",
)
"""What bounds how long something is waited for that comes sooner or later."""


def prompt(tokens: int, seed: int) -> list[int]:
    """A random prompt of `tokens` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def patient(kvpipe: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a configuration whose lookups and tiers wait as long as the machine takes, where it has nothing else."""
    if not kvpipe or not isinstance(tiers := kvpipe.get("tiers"), list):
        return kvpipe
    waits = dict.fromkeys(("lookup_ms_max", "lookup_slow_ms_max"), PATIENT_MS)
    return waits | kvpipe | {"tiers": [PATIENT | tier for tier in tiers]}


@contextmanager
def waiting() -> Iterator[None]:
    """Let engines in this process wait as long as the machine takes, where no configuration has a limit."""
    with ExitStack() as stack:
        for where in WAITS:
            stack.enter_context(patch(where, WAIT_S))
        yield


@contextmanager
def engine(recipe: str = "llama", kvpipe: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """A real engine for a locally made model, closed at the end."""
    if recipe in CONFIGURATIONS:
        options.setdefault("load_format", "dummy")
    model = make_configuration(recipe) if recipe in CONFIGURATIONS else make_model(recipe)
    made = Engine(str(model), kvpipe=patient(kvpipe), **options)
    try:
        yield made
    finally:
        made.close()


def baseline(
    prompts: Sequence[Sequence[int]], max_tokens: int, recipe: str = "llama", **options: Any
) -> list[list[int]]:
    """The outputs of the same engine without a connector; computed once per session for equal arguments."""
    key = repr((recipe, prompts, max_tokens, sorted(options.items())))
    if key not in _baselines:
        with engine(recipe, None, **options) as plain:
            _baselines[key] = plain.generate(prompts, max_tokens)
    return _baselines[key]


_baselines: dict[str, list[list[int]]] = {}


def assert_clean(live: Engine, *, expected: Sequence[str] = ()) -> dict[str, int]:
    """Nothing was contained or lost, nothing is left over, the catalog agrees with itself. Returns the counters."""
    live.settle()
    side = live.connector.scheduler
    assert side is not None
    check_integrity(side.catalog)
    stats = live.connector.stats()
    counters = dict(stats)
    worker = live.worker_connector.worker if live.local_worker else None
    if isinstance(worker, WorkerSide):
        counters |= {f"worker.{k}": v for k, v in worker.counters.items()}
        assert worker.pipeline.in_flight == 0, counters
    odd = {k: v for k, v in counters.items() if k.removeprefix("worker.") in UNEXPECTED and k not in expected}
    assert not odd, odd
    for gauge in ("leases", "pieces_writing", "jobs_in_flight", "requests"):
        assert stats[gauge] == 0, counters
    return counters


def assert_legal(trace_file: Path) -> None:
    """What engines have traced, if anything, is a proof: fed back through the machines, every transition is legal."""
    if trace_file.exists():
        traces = [Trace(part) for part in files_of(trace_file)]
        done = replay(itertools.chain.from_iterable(traces))
        assert done.problems == []
        assert not any(trace.unread for trace in traces)


def preempted(live: Engine, tokens: Sequence[int], max_tokens: int, after: int) -> list[int]:
    """Return the answer to a prompt, alone, of a request that loses its blocks once it has `after` tokens of it."""
    request = live.add(tokens, max_tokens)
    while live.busy and not any(one.num_output_tokens >= after for one in live.scheduler.requests.values()):
        live.step()
    (running,) = live.scheduler.requests.values()
    assert live.scheduler.reset_prefix_cache(reset_running_requests=True)
    answer = list(live.drain()[request].outputs[0].token_ids)
    assert running.num_preemptions == 1
    return answer


def ended(child: int) -> int:
    """Return how a child process ended; -1: it hung, and was killed."""
    found: list[int] = []

    def over() -> bool:
        done, status = os.waitpid(child, os.WNOHANG)
        found.extend([status] if done else [])
        return bool(done)

    if eventually(over, every_s=0.01):
        return found[0]
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1
