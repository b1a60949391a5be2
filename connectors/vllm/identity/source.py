"""Digests the whole tensors from which a model is loaded, before ranks take their parts of these tensors.

The weights in a rank's memory identify the model only for one number of ranks. With another number, a rank's part has
another shape, packing and padding. But every rank loads the same whole tensors. This module digests these tensors while
they are loaded. The digest identifies the weights in memory until the weights change. After a change, kvpipe cannot
compare the weights with the weights of an engine with another number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm import envs

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.identity.digest import facts_digest, tensor_facts
from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

CONNECTOR: Final = "KVPipeConnector"
_MARK: Final = "="


class LoadedFrom(NamedTuple):
    """The digests in the ranks' reports of their weights.

    `memory` has the digests of the weights in memory, in the ranks' order. `source` is the digest of the loaded
    tensors, or "" if it is unknown.
    """

    memory: str
    source: str


def loaded_from(reports: str) -> LoadedFrom:
    """Parse the ranks' reports of their weights. Each report is MEMORY or MEMORY=SOURCE; ':' separates the reports."""
    parts = [one.partition(_MARK) for one in reports.split(":")]
    sources = {source for _, _, source in parts}
    return LoadedFrom(":".join(memory for memory, _, _ in parts), sources.pop() if len(sources) == 1 else "")


class Source:
    """Reports the tensors from which a rank's models were loaded, until the weights change."""

    def __init__(self, loaded: list[str]) -> None:
        """Start with `loaded`, the result of `end_observing` for each model."""
        self._source = facts_digest([(one,) for one in loaded]) if loaded and all(loaded) else ""
        self._memory = ""

    def digests(self, memory: str) -> str:
        """Return the rank's report, MEMORY or MEMORY=SOURCE. `memory` is the digest of the weights in memory now.

        The `memory` of the first call counts as the digest of the loaded weights. If a later `memory` differs from the
        first, the rank reports no source.
        """
        self._memory = self._memory or memory
        return f"{memory}{_MARK}{self._source}" if self._source and memory == self._memory else memory


class _Observed:
    """The facts of the tensors that were loaded into one model so far."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, ...]] = []
        self.loaded: set[str] = set()
        self.whole = False  # whether every parameter of the model was loaded
        self.failed = False


_OBSERVED: Final[weakref.WeakKeyDictionary[torch.nn.Module, _Observed]] = weakref.WeakKeyDictionary()


def watch_loading(loader: Any) -> None:  # noqa: ANN401  (vLLM's module)
    """Observe the tensors that are loaded into models made from now on. Idempotent."""
    wrap(loader, "initialize_model", _made)


def _made(make: Callable[..., torch.nn.Module], vllm_config: VllmConfig, **kwargs: Any) -> torch.nn.Module:  # noqa: ANN401
    model = make(vllm_config, **kwargs)
    try:
        if _is_of_use(vllm_config, kwargs.get("model_config") or vllm_config.model_config):
            _observe(model)
    except Exception as error:  # noqa: BLE001  (the model must be loaded nevertheless)
        warn("weights_not_observed", error=repr(error))
    return model


def _is_of_use(config: VllmConfig, model: ModelConfig) -> bool:
    """Whether the engine uses tiers and the loaded tensors determine the KV for every number of ranks.

    Quantized models are excluded, because a scale that a rank computes from its part of the weights depends on the
    number of ranks. Loaders and workers outside of vLLM are excluded, because they may change a model unobserved while
    it is loaded. Engines in which a rank skips the weights of other ranks' experts are excluded too.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer is None or transfer.kv_connector != CONNECTOR or model.quantization is not None:
        return False
    if parallel.enable_ep_weight_filter or not tensor_parallel_only(parallel) or envs.VLLM_BATCH_INVARIANT:
        return False
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415  (slow)

    loader = type(get_model_loader(config.load_config)).__module__
    if not all(one.startswith("vllm.") for one in (loader, str(parallel.worker_cls))):
        return False
    return bool(load_settings(transfer.kv_connector_extra_config).tiers)


def tensor_parallel_only(parallel: ParallelConfig) -> bool:
    """Whether ranks divide only heads and experts, not layers or tokens, and one engine has all the ranks."""
    sizes = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    alone = parallel.world_size == parallel.tensor_parallel_size and not sees_a_part(parallel)
    return alone and sizes == (1, 1)


def sees_a_part(parallel: ParallelConfig) -> bool:
    """Whether an engine's outputs depend on experts in other engines (expert parallelism over data-parallel ranks)."""
    return parallel.enable_expert_parallel and parallel.data_parallel_size > 1


def _observe(model: torch.nn.Module) -> None:
    """Digest the tensors that are loaded into `model` until `end_observing` is called."""
    load: Callable[..., set[str] | None] = model.load_weights  # type: ignore[assignment]
    observed = _OBSERVED[model] = _Observed()

    def observed_load(
        weights: Iterable[tuple[str, torch.Tensor]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> set[str] | None:
        rest = _passing(observed, weights)
        loaded = load(rest, *args, **kwargs)
        observed.failed |= next(rest, None) is not None or loaded is None
        observed.loaded |= loaded or set()
        observed.whole = {name for name, _ in model.named_parameters()} <= observed.loaded
        return loaded

    model.load_weights = observed_load  # type: ignore[assignment]


def _passing(observed: _Observed, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        try:
            observed.facts += tensor_facts(name, tensor)
        except Exception as error:  # noqa: BLE001  (the model must be loaded nevertheless)
            observed.failed = True
            warn("weights_not_observed", tensor=name, error=repr(error))
        yield name, tensor


def end_observing(model: torch.nn.Module) -> str:
    """Stop observing `model`. Returns the digest of all loaded tensors, or "" if some tensors were not observed."""
    observed = _OBSERVED.pop(model, None)
    if observed is None:
        return ""
    del model.load_weights
    return facts_digest(observed.facts) if observed.whole and not observed.failed else ""


def end_all() -> None:
    """Stop observing all models."""
    for model in list(_OBSERVED):
        end_observing(model)
