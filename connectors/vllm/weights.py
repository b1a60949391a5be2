"""Which weights the engine has, as its scheduler's side knows it: told by every rank, doubted, asked for again.

Whatever may have changed them makes them doubtful: nothing is found and nothing saved until every rank has read its
weights again, at the beginning of a step. If they are others, everything is forgotten, and what is kept from now on has
another name: that of the new weights, so that who goes back to the old ones finds what was kept of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from kvpipe.trace.log import Counters, warn

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager

HARMLESS: Final = frozenset(
    {
        "add_lora",  # of an adapter, which has a name of its own
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
"""What vLLM asks of its workers that leaves the weights alone. After anything else they are read again."""

_WATCHED: Final = "_kvpipe_watched"
_WATCHING: Final[weakref.WeakSet[Weights]] = weakref.WeakSet()
"""Of the engines whose scheduler is in this process."""


class Weights:
    """One per engine, on the scheduler's thread."""

    def __init__(self, ranks: int, counters: Counters) -> None:
        """Nothing is known."""
        self._ranks, self._counters = ranks, counters
        self.digest = ""
        """Of all ranks' weights; nothing: a rank cannot say."""
        self._question = self._answered = self._sent = 0
        self._known = False
        self.engine: object = None
        """The cache configuration: the one object that all parts of an engine share in a process."""

    @property
    def doubtful(self) -> bool:
        """Whether they may be others than `digest` says."""
        return self._answered < self._question

    def know(self, told: Iterable[str]) -> bool:
        """Ranks have said which weights they have, in their order. Returns whether those are others than before.

        VLLM shakes hands once more when it wakes up.
        """
        before, self.digest = self.digest, _together(told)
        known, self._known = self._known, True
        return known and (not self.digest or self.digest != before)

    def suspect(self, why: str = "") -> None:
        """Something has happened that may have changed them."""
        self._question += 1
        self._counters["weights_suspected"] += 1
        self._counters[f"weights_suspected.{why}"] += bool(why)

    def ask(self) -> int:
        """Return the question that the next step takes to the ranks; 0: none."""
        if not self.doubtful or self._sent == self._question:
            return 0
        self._sent = self._question
        return self._question

    def answered(self, told: dict[int, tuple[int, str]]) -> bool:
        """Ranks have read their weights: question and digest, by rank. Returns whether they are others than before.

        Every answer counts, also one that is overtaken by another question: steps were computed with those weights.
        """
        if len(told) < self._ranks:
            self._counters.fault("weights_not_on_all_ranks", ranks=self._ranks, told=len(told))
            digest = ""
        else:
            digest = _together(digest for _, (_, digest) in sorted(told.items()))
        self._answered = max(self._answered, *(question for question, _ in told.values()))
        before, self.digest = self.digest, digest
        changed = not digest or digest != before
        self._counters["weights_changed" if changed else "weights_unchanged"] += 1
        return changed

    # ---- who may change them --------------------------------------------------------------------------------------

    def watch(self, config: VllmConfig) -> None:
        """Hear of everything that vLLM asks of the workers of this engine."""
        from vllm.v1.executor.abstract import Executor  # noqa: PLC0415  (slow)

        self.engine = config.cache_config
        _WATCHING.add(self)
        kinds = [Executor]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
            if "collective_rpc" in vars(kind):
                _watch_rpc(kind)

    def watch_resets(self, manager: KVCacheManager) -> None:
        """Hear of resets of vLLM's own prefix cache: who changes weights behind its back calls that."""
        reset = manager.reset_prefix_cache
        if hasattr(reset, _WATCHED):
            return

        @functools.wraps(reset)
        def watched() -> bool:
            self.suspect("reset_prefix_cache")
            return reset()

        setattr(watched, _WATCHED, True)
        manager.reset_prefix_cache = watched  # type: ignore[method-assign]


def suspect(config: VllmConfig, why: str) -> None:
    """Tell whoever watches this engine in this process that its weights may be others now."""
    for weights in list(_WATCHING):
        if weights.engine is config.cache_config:
            weights.suspect(why)


def _together(told: Iterable[str]) -> str:
    digests = list(told)
    return ":".join(digests) if digests and all(digests) else ""


def _watch_rpc(kind: Any) -> None:  # noqa: ANN401  (a class of executors)
    call = kind.collective_rpc
    if hasattr(call, _WATCHED):
        return

    @functools.wraps(call)
    def watched(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not (isinstance(method, str) and method in HARMLESS):
            try:
                suspect(self.vllm_config, method if isinstance(method, str) else "callable")
            except Exception as error:  # noqa: BLE001  (vLLM's call goes on)
                warn("weights_not_watched", error=repr(error))
        return call(self, method, *args, **kwargs)

    setattr(watched, _WATCHED, True)
    kind.collective_rpc = watched
