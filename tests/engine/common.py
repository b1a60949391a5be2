"""Prompts, a baseline engine and final checks that the engine scenarios share."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvpipe.connectors.vllm.tiny.engine import DEFAULTS, Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model
from kvpipe.connectors.vllm.trial.processors import MLA_BLOCK, PROCESSORS, Plan, plan, processor
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.waiting import PATIENT, PATIENT_MS, WAIT_S, eventually
from kvpipe.trace.reader import Trace, files_of
from kvpipe.trace.replay import replay
from kvpipe.worker.side import WorkerSide
from tests.rigs.configurations import CONFIGURATIONS, make_configuration

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
"""The block size that tests request.

Each engine's start checks that a model with attention alone has this block size.
"""

WAITS = (
    "kvpipe.node.catalog.NAME_S_MAX",
    "kvpipe.scheduler.fetches.PATIENCE_S",
    "kvpipe.tiers.carrier.DRAIN_S_MAX",
    "kvpipe.tiers.carrier.STOP_S_MAX",
    "kvpipe.trace.recorder.CLOSE_S_MAX",
    "kvpipe.trace.recorder._LOCK_S_MAX",
    "kvpipe.manage.engine.WAIT_S_MAX",
    "kvpipe.manage.engine.READ_S_MAX",
    "kvpipe.manage.engine.COUNT_S_MAX",
    "kvpipe.manage.survey.SURVEY_S_MAX",
)
"""The constants that limit how long kvpipe waits for events that are certain to come."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Return a random prompt of `tokens` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


def patient(kvpipe: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a configuration whose lookups and tiers wait as long as a slow machine takes.

    Limits in `config` are kept.
    """
    if not kvpipe or not isinstance(tiers := kvpipe.get("tiers"), list):
        return kvpipe
    waits = dict.fromkeys(("lookup_ms_max", "lookup_slow_ms_max"), PATIENT_MS)
    return waits | kvpipe | {"tiers": [PATIENT | tier for tier in tiers]}


@contextmanager
def waiting() -> Iterator[None]:
    """Let engines in this process wait as long as a slow machine takes.

    Only waits that no configuration limits change.
    """
    with ExitStack() as stack:
        for where in WAITS:
            stack.enter_context(patch(where, WAIT_S))
        yield


@contextmanager
def engine(recipe: str = "llama", kvpipe: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """Yield a real engine for a locally made model, and close the engine at the end."""
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
"""Options that decide an engine's backends and block size, or that vLLM decides together with the backends."""


def planned(model: Path, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> Plan:
    """Return the decisions of an engine before its first step. The options include the options that `Engine` adds."""
    return plan(model, kvpipe, **{name: one for name, one in (DEFAULTS | options).items() if name in SIZES})


def starts_on_every_processor(model: Path, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Start the engine on each simulated processor.

    The start ends when backends, block size and kvpipe's unit are known. So every engine that a test starts is checked
    on every processor, once in a session for each model and `SIZES`. The check costs 0.1 s, while a test on three
    processors would need three engines. An option may give the block size as a number. This size is then used on every
    processor, unless the platform has only one kernel, whose block size it sets.
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
    """Remove `cache_tokens` from an engine's options and return the engine's number of blocks.

    The number includes the one block that vLLM keeps for itself.
    """
    tokens = options.pop("cache_tokens", None)
    if tokens is None:
        return {}
    return {"num_gpu_blocks_override": tokens // planned(model, kvpipe, options).block_tokens}


def block_tokens(live: Engine) -> int:
    """Return the number of tokens in a block.

    With kvpipe, the block is kvpipe's unit. Without kvpipe, it is vLLM's longest block.
    """
    if live.scheduler.connector is not None:
        return int(live.connector.geometry.unit_tokens)
    return max(int(group.kv_cache_spec.block_size) for group in live.scheduler.kv_cache_config.kv_cache_groups)


def whole_blocks(of: Engine | int, *lengths: int) -> int:
    """Return how many tokens of prompts of these lengths are in whole blocks. `of` is an engine or a block size."""
    block = of if isinstance(of, int) else block_tokens(of)
    return sum(tokens // block * block for tokens in lengths)


def crowded(live: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the answers to prompts that are sent together.

    Copies of the prompts are added until a request is preempted.
    """
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
    """Return the answers of the same engine without a connector.

    The answers are computed once per session for equal arguments.
    """
    key = repr((recipe, prompts, max_tokens, sorted(options.items())))
    if key not in _baselines:
        with engine(recipe, None, **options) as plain:
            _baselines[key] = plain.generate(prompts, max_tokens)
    return _baselines[key]


_baselines: dict[str, list[list[int]]] = {}


def assert_clean(live: Engine, *, expected: Sequence[str] = ()) -> dict[str, int]:
    """Check that no fault was counted, nothing is held or under way, and the catalog is consistent.

    Return the counters.
    """
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
    """Check that every transition in the engines' trace is legal, if there is a trace."""
    if trace_file.exists():
        traces = [Trace(part) for part in files_of(trace_file)]
        done = replay(itertools.chain.from_iterable(traces))
        assert done.problems == []
        assert not any(trace.unread for trace in traces)


def preempted(live: Engine, tokens: Sequence[int], max_tokens: int, after: int) -> list[int]:
    """Return the answer to a prompt that runs alone and is preempted after `after` tokens of its answer."""
    request = live.add(tokens, max_tokens)
    while live.busy and not any(one.num_output_tokens >= after for one in live.scheduler.requests.values()):
        live.step()
    (running,) = live.scheduler.requests.values()
    assert live.scheduler.reset_prefix_cache(reset_running_requests=True)
    answer = list(live.drain()[request].outputs[0].token_ids)
    assert running.num_preemptions == 1
    return answer


def ended(child: int) -> int:
    """Return the exit status of a child process, or -1 if the child hung and was killed."""
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
