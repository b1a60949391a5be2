"""vLLM's sleep mode through its engine core and executor: the order of calls to ranks, and resets that keep chunks."""

from __future__ import annotations

import copy
import importlib.util
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvpipe.connectors.vllm import plugin
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.identity import sleep
from kvpipe.connectors.vllm.identity.weights import WeightCalls
from kvpipe.connectors.vllm.support import check_engine
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs
from kvpipe.errors import UnsupportedError
from kvpipe.scheduler.weights import Weights
from kvpipe.trace.log import Counters


class _Worker:
    """A worker of vLLM with the connector of its rank."""

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.calls = config, list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class _Executor(UniProcExecutor):
    """An executor whose worker has no model."""

    def __init__(self, worker: _Worker) -> None:
        self.vllm_config, self.driver_worker = worker.vllm_config, worker  # type: ignore[assignment]
        self.sleeping_tags = set[str]()


class _Core(EngineCore):
    """An engine core without a model.

    For each reset, `kept` has True if kvpipe keeps its chunks and False otherwise.
    """

    def __init__(self, worker: _Worker) -> None:
        self.vllm_config: Any = worker.vllm_config
        self.weights = Weights(1, Counters())
        side: Any = SimpleNamespace(weights=self.weights)
        self.watch, self.kept = WeightCalls(self.vllm_config, side), list[bool]()
        self.model_executor = _Executor(worker)
        self.scheduler: Any = SimpleNamespace(
            finish_requests=lambda *_: None,
            has_requests=bool,
            pause_state=PauseState.UNPAUSED,
            set_pause_state=lambda state: setattr(self.scheduler, "pause_state", state),
            reset_prefix_cache=self._reset,
        )
        self.batch_queue = self.mm_receiver_cache = None
        self.reset_mm_cache = self.reset_encoder_cache = lambda: None  # type: ignore[method-assign]

    def _reset(self, *_: object) -> bool:
        self.kept.append(self.watch.sleep.keeps)
        return True


@pytest.fixture
def worker() -> _Worker:
    """Yield a worker whose rank has joined."""
    made = _Worker(SimpleNamespace(cache_config=SimpleNamespace()))
    sleep.join(made.vllm_config, made, made)  # type: ignore[arg-type]
    return made


@pytest.fixture
def core(worker: _Worker) -> _Core:
    """Return the engine core of the worker."""
    return _Core(worker)


RELEASES, RESTORES = "unregister_kv_caches", "restore_kv_caches"
BEFORE = ["synchronize_device"]


@pytest.mark.parametrize(("level", "more"), [(1, []), (2, ["lose"])])
def test_ranks_release_before_memory_is_freed_and_return_when_it_is_restored(
    core: _Core, worker: _Worker, level: int, more: list[str]
) -> None:
    """At level 2 adapters and weights are lost. kvpipe reads the weights again only after all memory is restored."""
    core.sleep(level)
    assert worker.take() == [*BEFORE, RELEASES, *more, "sleep"]
    assert core.weights.doubtful
    assert core.weights.next_question() == 0
    core.wake_up(["weights"])
    assert worker.take() == ["wake_up"]
    assert core.weights.next_question() == 0
    core.wake_up(["kv_cache"])
    assert worker.take() == ["wake_up", RESTORES]
    assert core.weights.next_question()
    core.sleep(level=level)
    core.wake_up()
    assert worker.take() == [*BEFORE, RELEASES, *more, "sleep", "wake_up", RESTORES]
    assert core.kept == [True, True]


def test_ranks_release_when_only_their_kv_caches_are_freed(core: _Core, worker: _Worker) -> None:
    """vLLM frees only the KV caches. The weights and adapters stay in memory."""
    core.sleep(0)
    core.release_kv_cache_memory()
    assert worker.take() == [*BEFORE, RELEASES, "discard"]
    assert core.weights.next_question() == 0
    core.wake_up(["kv_cache"])
    assert worker.take() == ["wake_up", RESTORES]
    assert core.weights.next_question()
    assert core.kept == [True]


def test_calls_of_workers_past_the_executor_count(core: _Core, worker: _Worker) -> None:
    """Some training frameworks call the workers directly, with or without the names of the memory to free."""
    for args, kwargs, lost in [((), {}, 0), ((2,), {}, 1), ((), {"level": 2}, 1)]:
        core.collective_rpc("sleep", None, args, kwargs)
        assert worker.take() == [RELEASES, *["lose"] * lost, "sleep"]
        core.collective_rpc("wake_up", kwargs={"tags": None})
        assert worker.take() == ["wake_up", RESTORES]


@pytest.mark.parametrize(
    ("method", "args", "calls"),
    [
        ("discard", ("kv_cache",), [RELEASES, "discard"]),
        ("discard", (("weights",),), ["lose", "discard"]),
        ("wake_up", ([],), ["wake_up"]),
        ("wake_up", ("kv_cache",), ["wake_up", RESTORES]),
        ("discard", (3,), ["discard"]),
    ],
)
def test_calls_of_workers_name_memory_as_its_allocator_does(
    core: _Core, worker: _Worker, method: str, args: tuple[Any, ...], calls: list[str]
) -> None:
    """A call has one name or several. An empty list names no memory, and None names all memory.

    Calls of other methods are only passed on.
    """
    core.collective_rpc(method, None, args)
    assert worker.take() == calls


def test_only_the_reset_of_a_sleep_keeps_chunks(core: _Core) -> None:
    """A pause that clears caches drops chunks.

    This is so also after a failed sleep, or after a sleep that unmaps no memory.
    """
    core.pause_scheduler(clear_cache=True)
    core.sleep(0)
    core.pause_scheduler(clear_cache=True)
    with pytest.raises(ValueError, match="mode"):
        core.sleep(1, "forever")  # type: ignore[arg-type]
    core.pause_scheduler(clear_cache=True)
    core.sleep(1)
    core.pause_scheduler(clear_cache=True)
    assert core.kept == [False, False, False, True, False]


def test_a_sleep_that_waits_for_requests_keeps_chunks(core: _Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine process resets its caches later, when the last request has ended."""
    idle = Future[None]()
    monkeypatch.setattr(core, "pause_scheduler", lambda **_: idle)
    asleep = core.sleep(1, "wait")
    assert asleep is not None
    assert core.kept == []
    core._finish_pause(clear_cache=True)
    idle.set_result(None)
    assert asleep.done()
    core._finish_pause(clear_cache=True)
    assert core.kept == [True, False]


def test_a_sleep_that_is_asked_for_twice_keeps_chunks(core: _Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client asks for the sleep a second time while requests end.

    VLLM resets the caches once per call, and both resets keep chunks.
    """
    monkeypatch.setattr(core, "pause_scheduler", lambda **_: Future[None]())
    for _ in range(2):
        core.sleep(1, "wait")
    for _ in range(3):
        core._finish_pause(clear_cache=True)
    assert core.kept == [True, True, False]


def test_a_sleep_that_fails_wakes_kvpipe(core: _Core, worker: _Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM continues as if it were awake, so ranks copy again, and kvpipe reads the weights again."""

    def refused(*_: object, **__: object) -> None:
        raise ValueError("no such weights")

    monkeypatch.setattr(worker, "sleep", refused, raising=False)
    with pytest.raises(ValueError, match="no such weights"):
        core.sleep(1)
    assert worker.take() == [*BEFORE, RELEASES, RESTORES]
    assert core.weights.next_question()


def test_rank_follows_calls_of_its_own_engine_only(core: _Core) -> None:
    """Two engines are in one process. A rank follows the calls of its own engine only."""
    other = _Worker(SimpleNamespace(cache_config=SimpleNamespace()))
    sleep.join(other.vllm_config, other, other)  # type: ignore[arg-type]
    core.sleep(2)
    assert other.take() == []


def test_a_process_that_becomes_a_snapshot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of `vllm snapshot create` sleeps at level 2 while vLLM writes its memory to an image.

    The refusal comes early, because the command makes the executor before all other parts.
    """
    config = copy.deepcopy(make_configs(SHAPES["sync"])[0])
    plugin.register()
    Executor.get_class(config)
    program = SimpleNamespace(__spec__=SimpleNamespace(name="vllm.snapshot.server"))
    assert importlib.util.find_spec(program.__spec__.name), "vLLM has it under this name"
    monkeypatch.setitem(sys.modules, "__main__", program)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"`vllm snapshot create` is not supported; create the snapshot without"):
        Executor.get_class(config)


def test_other_ways_to_sleep_are_refused() -> None:
    """The allocator `cumem` keeps addresses, streams and threads. Other backends may change them."""
    config = copy.deepcopy(make_configs(SHAPES["sync"])[0])
    config.model_config.enable_sleep_mode = True
    check_engine(config)
    config.model_config.sleep_mode_backend = "checkpoint"
    with pytest.raises(UnsupportedError, match=r"^kvpipe: sleep_mode_backend='checkpoint' .* set it to 'cumem'"):
        check_engine(config)
    config.model_config.enable_sleep_mode = False
    check_engine(config)
    assert KVPipeConnector.supports_sleep_mode(config.kv_transfer_config)
