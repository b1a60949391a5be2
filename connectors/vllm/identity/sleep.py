"""vLLM's sleep mode: vLLM releases and restores the memory of weights and KV caches, and kvpipe keeps pool and tiers.

The scheduler side observes vLLM's calls to its workers. Before memory is released, every rank ends its copies. When the
caches have memory again, every rank reads the caches' new addresses. vLLM 0.33 calls connectors for both events itself,
and vLLM 0.32 does not. A second call for the same event has no effect.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from kvpipe.connectors.vllm.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.worker.adapters import HeldAdapters

T = TypeVar("T")
KV, WEIGHTS = "kv_cache", "weights"
ALL: Final = frozenset({KV, WEIGHTS})
"""The names in vLLM of the parts of the memory that a sleep can release."""
_METHODS: Final = ("sleep", "discard", "wake_up")
"""The calls to vLLM's workers that change the workers' memory.

A tuple, because a set cannot be searched for a call's method if the method is a function without a hash.
"""
_DISCARDS: Final = 2
"""The lowest sleep level at which vLLM discards the weights instead of copying them to the host."""


class _Sleeper(Protocol):
    """The methods of a rank's connector that a sleep needs."""

    def unregister_kv_caches(self) -> None:
        """Called before the memory of the caches is unmapped."""

    def restore_kv_caches(self) -> None:
        """Called after the memory of the caches is mapped again."""


class _Change(NamedTuple):
    """The change that a call to the workers makes to their memory.

    `goes` has the unmapped parts, and `comes` the parts that are mapped again. `discards` says that the weights are not
    kept on the host.
    """

    goes: frozenset[str] = frozenset()
    comes: frozenset[str] = frozenset()
    discards: bool = False


_RANKS: Final[weakref.WeakKeyDictionary[_Sleeper, object]] = weakref.WeakKeyDictionary()
_ADAPTERS: Final[weakref.WeakKeyDictionary[HeldAdapters, object]] = weakref.WeakKeyDictionary()
_SLEEPS: Final[weakref.WeakKeyDictionary[Sleep, object]] = weakref.WeakKeyDictionary()
"""The `Sleep` objects of this process, each with the `cache_config` of its engine.

All parts of an engine in one process share the `cache_config`, so this object identifies the engine.
"""


def join(config: VllmConfig, rank: _Sleeper, adapters: HeldAdapters) -> None:
    """Register `rank`, a connector of this process, so that its caches and `adapters` follow the engine's sleep."""
    _RANKS[rank] = _ADAPTERS[adapters] = config.cache_config


class Sleep:
    """Follows one engine's sleep on the scheduler side, for as long as the `Sleep` object is referenced."""

    def __init__(self, config: VllmConfig, side: SchedulerSide) -> None:
        """Follow the sleep of the engine of `config`, and report sleeps to `side`."""
        self.gone: frozenset[str] = frozenset()
        self.keeps = False
        """Whether vLLM is resetting its caches because the engine falls asleep. If so, the pool is kept."""
        self._falls, self._side = 0, side  # sleeps that have begun and not reset the caches yet
        _SLEEPS[self] = config.cache_config
        core = sys.modules.get("vllm.v1.engine.core")  # imported before the engine makes its scheduler
        if core is not None:
            wrap(core.EngineCore, "sleep", _sleep)
            wrap(core.EngineCore, "release_kv_cache_memory", _fall)
            wrap(core.EngineCore, "_reset_caches", _reset)

    def fall(self, *, falls: bool = True) -> None:
        """Record that a sleep begins, for which vLLM will reset all caches.

        `falls=False` undoes this after the sleep has failed.

        A client may request a sleep again before the engine is idle. vLLM then resets the caches once for each request.
        """
        self._falls = max(0, self._falls + (1 if falls else -1))

    def reset(self, *, begins: bool) -> None:
        """Record that a reset of all caches, which vLLM itself has started, begins or ends."""
        self.keeps = begins and self._falls > 0
        if not begins:
            self._falls = max(0, self._falls - 1)

    def forget(self) -> bool:
        """Forget every chunk unless the engine falls asleep. Returns True.

        After a sleep the digest of the weights decides whether chunks are still valid.
        """
        if self.keeps:
            self._side.counters["reset_kept"] += 1
            return True
        return self._side.reset()

    def change(self, change: _Change) -> None:
        """Record which memory was released or restored. Ranks must not read unmapped weights."""
        self.gone = (self.gone | change.goes) - change.comes
        self._side.weights.asleep = bool(self.gone)


def around(rpc: Callable[..., Any], executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Make vLLM's call `rpc` to its workers.

    Ranks end their copies before a call that releases memory, and use the caches again after a call that restores it.
    """
    try:
        change = _change(method, *args, **kwargs)
    except (TypeError, ValueError):  # the arguments do not fit the method, so vLLM's workers refuse the call
        change = None
    sleeps = _of(_SLEEPS, executor.vllm_config) if change is not None else []
    if change is None or not sleeps:
        return rpc(executor, method, *args, **kwargs)
    if change.goes:
        for sleep in sleeps:
            sleep.change(change)
        rpc(executor, _release, kwargs={"copies": KV in change.goes, "discards": change.discards})
    try:
        result = rpc(executor, method, *args, **kwargs)
    except Exception:
        if method == "sleep":  # the engine stays awake; after a failed `discard` vLLM treats the memory as released
            _wake(rpc, executor, sleeps, _Change(comes=change.goes))
        raise
    _wake(rpc, executor, sleeps, change)
    return result


def _wake(rpc: Callable[..., Any], executor: Any, sleeps: list[Sleep], change: _Change) -> None:  # noqa: ANN401
    """Make ranks use their caches again if the memory of the caches is restored."""
    if KV in change.comes:
        rpc(executor, _restore)
    for sleep in sleeps if change.comes else ():
        sleep.change(change)


def _names(named: Any) -> frozenset[str]:  # noqa: ANN401
    """Return the parts of the memory that a call names. vLLM's allocator accepts one name or several names."""
    return frozenset((named,) if isinstance(named, str) else named or ())


def _change(
    method: object,
    _timeout: object = None,
    args: Any = (),  # noqa: ANN401
    kwargs: Any = None,  # noqa: ANN401
    *_: object,
    **__: object,
) -> _Change | None:
    """Return the change that a call makes to the workers' memory, or None if the call changes no memory."""
    if method not in _METHODS:  # most calls, such as those of every step, change no memory
        return None
    first = next(iter({**dict(enumerate(args)), **(kwargs or {})}.values()), None)
    if method == "sleep":
        return _Change(goes=ALL, discards=first is not None and first >= _DISCARDS)
    if method == "discard":
        return _Change(goes=_names(first), discards=WEIGHTS in _names(first))
    return _Change(comes=ALL if first is None else _names(first))


def _of(those: Mapping[T, object], config: VllmConfig | None) -> list[T]:
    """Return the objects of the engine of `config`, or [] if `config` is None, as in some of vLLM's own tests."""
    return [one for one, engine in list(those.items()) if config is not None and engine is config.cache_config]


def _release(worker: Any, *, copies: bool, discards: bool) -> None:  # noqa: ANN401  (vLLM's worker)
    """Make a rank end its copies if `copies`, and lose its adapters if `discards`. Runs in the rank's process."""
    for rank in _of(_RANKS, worker.vllm_config) if copies else ():
        rank.unregister_kv_caches()
    for adapters in _of(_ADAPTERS, worker.vllm_config) if discards else ():
        adapters.lose()


def _restore(worker: Any) -> None:  # noqa: ANN401
    """Make a rank use its caches again. Runs in the rank's process."""
    for rank in _of(_RANKS, worker.vllm_config):
        rank.restore_kv_caches()


def _sleep(call: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Put an engine to sleep. At level 0 vLLM releases no memory and resets no cache."""
    return _fall(call, core, level, *args, **kwargs) if level else call(core, level, *args, **kwargs)


def _fall(call: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Put an engine to sleep, or release its KV caches. To do so, vLLM resets all caches, perhaps much later."""
    sleeps = _of(_SLEEPS, getattr(core, "vllm_config", None))
    for sleep in sleeps:
        sleep.fall()
    try:
        return call(core, *args, **kwargs)
    except BaseException:
        for sleep in sleeps:
            sleep.fall(falls=False)
        raise


def _reset(reset: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Reset an engine's caches. vLLM itself resets the caches at a pause and when the engine falls asleep."""
    sleeps = _of(_SLEEPS, getattr(core, "vllm_config", None))
    for sleep in sleeps:
        sleep.reset(begins=True)
    try:
        return reset(core, *args, **kwargs)
    finally:
        for sleep in sleeps:
            sleep.reset(begins=False)
