"""Watches vLLM's calls to its workers, and finds the calls that may change an engine's weights or adapters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvpipe.connectors.vllm.identity.sleep import Sleep, around
from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvpipe.scheduler.side import SchedulerSide

HARMLESS: Final = frozenset(
    {
        "add_lora",  # changes adapters only, see `ADAPTER_CALLS`
        "annotate_profile",
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "initialize_from_config",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
    }
)
"""Calls to workers that do not change the weights. After any other call, every rank digests its weights again."""

ADAPTER_CALLS: Final = frozenset({"add_lora", "remove_lora"})
"""Calls after which ranks may hold another adapter under the same adapter number."""

_WATCHING: Final[weakref.WeakSet[WeightCalls]] = weakref.WeakSet()


class WeightCalls:
    """Watches the calls to one engine's workers for as long as the `WeightCalls` object is referenced.

    Each engine whose scheduler is in this process has one such object.
    """

    def __init__(self, config: VllmConfig, side: SchedulerSide) -> None:
        """Watch all calls to the workers of this engine, and report changes to `side`."""
        from vllm.v1.executor.abstract import Executor  # noqa: PLC0415  (slow)

        self.side = side
        self.doubted: Callable[[], object] = bool
        """A function that is called before weights may change."""
        self.encoder_reset: Callable[[], object] = bool
        """A function that is called when vLLM empties its encoder cache."""
        self.engine: object = config.cache_config  # the only object that all parts of an engine share in a process
        self.sleep = Sleep(config, side)
        _WATCHING.add(self)
        kinds = [Executor]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
            if "collective_rpc" in vars(kind):
                wrap(kind, "collective_rpc", _call)

    def suspect(self, why: str) -> None:
        """Record that the weights may have changed. `why`: the name of the call, for the counter."""
        self.doubted()
        self.side.weights.suspect(why)

    def watch_resets(self, manager: KVCacheManager) -> None:
        """Suspect changed weights when vLLM's prefix cache is reset, because trainers do so after a change."""

        def watched(reset: Callable[[], bool]) -> bool:
            self.suspect("reset_prefix_cache")
            return reset()

        wrap(manager, "reset_prefix_cache", watched)


def suspect(config: VllmConfig, why: str) -> None:
    """Record that this engine's weights may have changed, if the engine's scheduler is in this process."""
    for watch in _watching(config):
        watch.suspect(why)


def _watching(config: VllmConfig) -> Iterator[WeightCalls]:
    return (watch for watch in list(_WATCHING) if watch.engine is config.cache_config)


def _call(rpc: Callable[..., Any], executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    try:
        _notice(executor.vllm_config, method if isinstance(method, str) else "callable", *args[:2], **kwargs)
    except Exception as error:  # noqa: BLE001  (vLLM's call must continue)
        warn("weights_not_watched", error=repr(error))
    return around(rpc, executor, method, *args, **kwargs)


def _notice(config: VllmConfig, method: str, _timeout: object = None, args: Sequence[Any] = (), **_: object) -> None:
    """Record what the call `method` of the workers may change: weights, adapters or the encoder cache."""
    if method not in HARMLESS:
        suspect(config, method)
    if method == "reset_encoder_cache":
        for watch in _watching(config):
            watch.encoder_reset()
    if method in ADAPTER_CALLS:
        for watch in _watching(config):
            watch.side.adapter_called(getattr(args[0], "lora_int_id", args[0]))
