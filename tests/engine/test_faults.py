"""A fault costs a miss or an error, never a wrong answer or a crash of the engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace import events as e
from kvpipe.trace.reader import Trace
from tests.engine.common import assert_clean, baseline, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

FAULTY = "tests.engine.faulty"
STUCK_MS = 3000  # much longer than any other load takes
PROMPTS = [prompt(200 + 40 * i, 300 + i) for i in range(4)]
DECODED = 26
"""The number of answer tokens within which three of the four requests end a block."""


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("caching", [False, True])
def test_every_second_load_fails_and_is_recomputed(load: str, caching: bool) -> None:
    """With policy recompute, answers are right, failed tokens are computed again, and nothing leaks."""
    expected = baseline(PROMPTS, 12, enable_prefix_caching=caching)
    options: dict[str, Any] = {"enable_prefix_caching": caching, "connector": "EverySecondLoadFails", "module": FAULTY}
    with engine(kvpipe={"load": load}, **options) as live:
        for _ in range(3):
            assert live.generate(PROMPTS, 12) == expected
            live.settle()
            if caching:
                live.llm.reset_prefix_cache()
        stats = assert_clean(live)
        assert stats["load_failed"] >= 2
        assert stats["tokens_loaded"] > 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_every_second_load_fails_and_the_request_with_it(load: str) -> None:
    """With policy fail, a request whose load fails ends with an error.

    The other requests are answered, and nothing leaks.
    """
    expected = baseline(PROMPTS, 12, enable_prefix_caching=False)
    options: dict[str, Any] = {"policy": "fail", "connector": "EverySecondLoadFails", "module": FAULTY}
    with engine(kvpipe={"load": load}, enable_prefix_caching=False, **options) as live:
        assert live.generate(PROMPTS, 12) == expected
        live.settle()
        ids = [live.add(p, 12) for p in PROMPTS]
        outputs = live.drain()
        reasons = [outputs[i].outputs[0].finish_reason if i in outputs else "none" for i in ids]
        assert reasons.count("error") == 2, reasons
        for i, answer in zip(ids, expected, strict=True):
            if outputs[i].outputs[0].finish_reason == "length":
                assert list(outputs[i].outputs[0].token_ids) == answer
        assert assert_clean(live)["load_failed"] == 2


def test_load_that_never_ends_fails_after_its_timeout(trace_file: Path) -> None:
    """The watchdog reports the load and its request.

    Then the request computes its tokens, and the next request loads.
    """
    expected = baseline(PROMPTS[:1], 12, enable_prefix_caching=False)
    options: dict[str, Any] = {"connector": "FirstLoadIsLost", "module": FAULTY, "enable_prefix_caching": False}
    with engine(kvpipe={"load": "async", "stuck_ms_max": STUCK_MS}, **options) as live:
        for _ in range(3):
            assert live.generate(PROMPTS[:1], 12) == expected
            live.settle()
        stats = assert_clean(live)
    assert stats["worker.stuck"] == stats["load_failed"] == 1
    events = list(Trace(trace_file))
    (stuck,) = [one for one in events if isinstance(one, e.Stuck)]
    lives = [one for one in events if isinstance(one, e.RequestDone)]
    assert [one.loads_failed for one in lives] == [0, 1, 0]
    assert stuck.request == lives[1].request
    assert lives[1].loading_ms >= STUCK_MS
    assert lives[2].loaded_tokens > 0


def test_every_second_save_fails() -> None:
    """Chunks of failed saves are never found. Chunks of the other saves are found."""
    expected = baseline(PROMPTS, 12, enable_prefix_caching=False)
    with engine(kvpipe={}, enable_prefix_caching=False, connector="EverySecondSaveFails", module=FAULTY) as live:
        for _ in range(3):
            for tokens, answer in zip(PROMPTS, expected, strict=True):
                assert live.generate([tokens], 12) == [answer]
        stats = assert_clean(live)
        assert stats["save_failed"] >= 2
        assert stats["tokens_loaded"] > 0


def test_repeated_calls_change_no_answer() -> None:
    """The end of a step is repeated, also in empty steps and after clear.

    Hooks are repeated, and freeze is toggled in the forward.
    """
    expected = baseline(PROMPTS, DECODED, enable_prefix_caching=False)
    with engine(kvpipe={}, enable_prefix_caching=False, connector="Unruly", module=FAULTY) as live:
        worker = live.worker_connector
        worker.wait_for_save()  # no step has begun
        worker.wait_for_layer_load("model.layers.0.self_attn.attn")
        worker.clear_connector_metadata()
        for _ in range(2):
            assert live.generate(PROMPTS, DECODED) == expected
            live.core.step()  # an empty step
            worker.wait_for_save()
        stats = assert_clean(live, expected=("worker.hook_for_unknown_layer",))
        assert stats["tokens_loaded"] > 0
        assert stats["worker.hook_for_unknown_layer"] > 0
        assert stats["worker.step_end_empty"] > 0
        assert stats["worker.save_repeated"] > 0


def test_steps_that_are_replayed() -> None:
    """In every second step no hook runs, as in the replay of a CUDA graph.

    Saves succeed, hits are right, and no fault is counted.
    """
    expected = baseline(PROMPTS, DECODED, enable_prefix_caching=False)
    with engine(kvpipe={"load": "sync"}, enable_prefix_caching=False, connector="Replayed", module=FAULTY) as live:
        for _ in range(3):
            assert live.generate(PROMPTS, DECODED) == expected
        stats = assert_clean(live)
        assert stats["tokens_loaded"] >= 2 * (whole_blocks(live, *map(len, PROMPTS)) - len(PROMPTS))


def test_hooks_that_never_run_publish_nothing() -> None:
    """If no layer hook runs, saves fail, nothing is published, and answers are right."""
    expected = baseline(PROMPTS, 8, enable_prefix_caching=False)
    with engine(kvpipe={}, enable_prefix_caching=False, connector="HooksSkipped", module=FAULTY) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 8) == expected
        stats = assert_clean(live, expected=("worker.layers_never_submitted",))
        assert stats.get("pieces_published", 0) == 0
        assert stats.get("tokens_loaded", 0) == 0
        assert stats["slots_used"] == 0


@pytest.mark.parametrize("load", ["sync", "async"])
def test_storm_of_arrivals_and_aborts(load: str) -> None:
    """Sixty requests with shared prefixes arrive, and random requests are aborted.

    The other requests get right answers.
    """
    rng = random.Random(11)
    heads = [prompt(64 * (i + 1), 400 + i) for i in range(4)]
    prompts = [rng.choice(heads) + prompt(rng.randrange(5, 90), 500 + i) for i in range(60)]
    options: dict[str, Any] = {"cache_tokens": 1920, "max_num_seqs": 12, "max_num_batched_tokens": 512}
    expected = baseline(prompts, 24, **options)
    with engine(kvpipe={"load": load, "chunk_tokens": 64, "pool_bytes_max": 8192 * TOKEN_BYTES}, **options) as live:
        waiting, alive, done = list(range(60)), {}, {}
        while waiting or live.busy:
            for _ in range(rng.randrange(0, 4)):
                if waiting:
                    i = waiting.pop()
                    alive[live.add(prompts[i], 24)] = i
            for output in live.step():
                done[output.request_id] = output
            if alive and rng.random() < 0.25:
                live.abort(rng.choice(list(alive)))
        finished = 0
        for request_id, i in alive.items():
            if request_id in done and done[request_id].outputs[0].finish_reason == "length":
                finished += 1
                assert list(done[request_id].outputs[0].token_ids) == expected[i]
        assert 5 < finished < 60
        stats = assert_clean(live)
        assert stats["tokens_loaded"] > 0


def test_the_same_request_id_again_and_again() -> None:
    """A request with a reused id inherits nothing, whether the earlier request was aborted or finished."""
    expected = baseline(PROMPTS, 12, enable_prefix_caching=False)
    with engine(kvpipe={}, enable_prefix_caching=False) as live:
        for round_ in range(8):
            tokens, answer = PROMPTS[round_ % 4], expected[round_ % 4]
            live.add(tokens, 12, request_id="same")
            if round_ % 3 == 1:
                for _ in range(round_):
                    live.step()
                live.abort("same")
                continue
            outputs = live.drain()
            assert list(outputs["same"].outputs[0].token_ids) == answer
        assert assert_clean(live)["tokens_loaded"] > 0


def test_shutdown_with_work_in_flight() -> None:
    """A shutdown with running requests raises nothing. Calls of hooks after the shutdown raise nothing."""
    with engine(kvpipe={"load": "async"}, enable_prefix_caching=False) as live:
        live.generate(PROMPTS, 4)
        for tokens in PROMPTS:
            live.add(tokens, 30)
        for _ in range(3):
            live.step()
        worker, scheduler = live.worker_connector, live.connector
        worker.shutdown()
        worker.shutdown()
        worker.wait_for_layer_load("model.layers.0.self_attn.attn")
        worker.wait_for_save()
        for _ in range(3):
            live.step()
        assert "contained_error" not in worker.counters
        assert "contained_error" not in scheduler.counters


def test_cache_reset_in_mid_run() -> None:
    """A reset drops all chunks, including those being saved. Loads in flight finish, and answers stay right."""
    expected = baseline(PROMPTS, 20)
    with engine(kvpipe={}, enable_prefix_caching=True) as live:
        live.generate(PROMPTS, 4)
        ids = [live.add(p, 20) for p in PROMPTS]
        outputs: dict[str, Any] = {}
        for step in range(400):
            outputs |= {o.request_id: o for o in live.step()}
            if step in {0, 1, 5, 12}:
                assert live.connector.reset_cache() is True
                side = live.connector.scheduler
                assert side is not None
                assert not side.catalog.index(0)
                check_integrity(side.catalog)
            if not live.busy:
                break
        assert [list(outputs[i].outputs[0].token_ids) for i in ids] == expected
        assert assert_clean(live)["reset"] == 4
        assert live.llm.reset_prefix_cache(reset_connector=True)
        before = live.connector.stats().get("tokens_loaded", 0)
        assert live.generate(PROMPTS, 20) == expected
        assert assert_clean(live).get("tokens_loaded", 0) == before
