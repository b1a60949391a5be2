"""What the engine scenarios share: prompts, a baseline engine, and what must hold after every one of them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvpipe.connectors.vllm.trial.engine import DEFAULTS, Engine
from kvpipe.connectors.vllm.trial.processors import MLA_BLOCK, PROCESSORS, Plan, plan, processor
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

BLOCK: Final = int(DEFAULTS["block_size"])
"""Tokens of a block that engines are asked for. Those of attention alone have it, which each engine's start checks."""

WAITS = (
    "kvpipe.scheduler.fetches.PATIENCE_S",
    "kvpipe.tiers.carrier.DRAIN_S_MAX",
    "kvpipe.tiers.carrier.STOP_S_MAX",
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
    blocks = _blocks(model, kvpipe, options)
    made = Engine(str(model), kvpipe=patient(kvpipe), **options | blocks)
    try:
        starts_on_every_processor(model, kvpipe, options)
        yield made
    finally:
        made.close()


SIZES = (
    "dtype", "kv_cache_dtype", "block_size", "prefix_match_unit", "enable_prefix_caching", "speculative_config",
    "load_format", "max_model_len",
)  # fmt: skip
"""The options of an engine that decide its backends and the size of its blocks, or are decided with them."""


def planned(model: Path, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> Plan:
    """Return what an engine decides before its first step, with the options that `Engine` adds."""
    return plan(model, kvpipe, **{name: one for name, one in (DEFAULTS | options).items() if name in SIZES})


def starts_on_every_processor(model: Path, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Start the engine on each simulated processor, up to backends, block size and kvpipe's unit.

    So every engine that a test starts is checked on every processor, once for each model and sizes in a session: that
    costs 0.1 s, where a test that runs three times would cost three engines. An engine of a named block size has it
    everywhere, or the platform gives it the block size of its only kernel.
    """
    key = repr((model, kvpipe and kvpipe.get("chunk_tokens"), [options.get(name) for name in SIZES]))
    if key in _started:
        return
    for kind in PROCESSORS:
        with processor(kind):
            made = planned(model, kvpipe, options)
        asked = options.get("block_size", DEFAULTS["block_size"])
        states, only = any(cache == "MambaSpec" for cache, _, _ in made.caches), "CPU_MLA" in made.backends
        assert made.block_tokens == (MLA_BLOCK if only else asked) or states, (kind, made)
        assert made.unit_tokens is None or made.unit_tokens % made.block_tokens == 0, (kind, made)
    _started.add(key)


_started: set[str] = set()


def _blocks(model: Path, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, int]:
    """Take `cache_tokens` out of an engine's options and return it as a number of the blocks that the engine will have.

    VLLM keeps one block for itself.
    """
    tokens = options.pop("cache_tokens", None)
    if tokens is None:
        return {}
    return {"num_gpu_blocks_override": tokens // planned(model, kvpipe, options).block_tokens}


def block_tokens(live: Engine) -> int:
    """Return the tokens of the engine's blocks: of kvpipe's unit, or without kvpipe of vLLM's longest block."""
    if live.scheduler.connector is not None:
        return int(live.connector.geometry.unit_tokens)
    return max(int(group.kv_cache_spec.block_size) for group in live.scheduler.kv_cache_config.kv_cache_groups)


def whole_blocks(of: Engine | int, *lengths: int) -> int:
    """Return how many tokens of prompts of these lengths are in whole blocks, of an engine or of so many tokens."""
    block = of if isinstance(of, int) else block_tokens(of)
    return sum(tokens // block * block for tokens in lengths)


def crowded(live: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the answers to prompts that are sent together, in more and more copies until a request is preempted."""
    for copies in (1, 2, 4, 8):
        before = sum(live.preemptions.values())
        answers = live.generate([*prompts] * copies, max_tokens)
        assert answers == answers[: len(prompts)] * copies
        if sum(live.preemptions.values()) > before:
            return answers[: len(prompts)]
    message = f"no request was preempted, of {8 * len(prompts)} at once"
    raise AssertionError(message)


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
