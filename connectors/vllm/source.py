"""From which weights a model was loaded: a digest of whole tensors, before ranks have taken their parts of them.

The weights in a rank's memory do not identify those of another number of ranks: parts have other shapes, are packed and
padded. But every rank is given the same tensors to take its part of, and they are digested here on their way into the
model. That digest stands for what is in memory only as long as the memory is what it was just after loading; once it
has changed, nobody knows what other ranks would have made of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm import envs

from kvpipe.config import load_settings
from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.digest import facts_digest, tensor_facts
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

CONNECTOR: Final = "KVPipeConnector"
_MARK: Final = "="


class LoadedFrom(NamedTuple):
    """`memory`: digests of the weights in memory, in the ranks' order. `source`: of what was loaded; "": unknown."""

    memory: str
    source: str


def loaded_from(reports: str) -> LoadedFrom:
    """Parse the ranks' reports of their weights, MEMORY or MEMORY=SOURCE each, with ':' between them."""
    parts = [one.partition(_MARK) for one in reports.split(":")]
    sources = {source for _, _, source in parts}
    return LoadedFrom(":".join(memory for memory, _, _ in parts), sources.pop() if len(sources) == 1 else "")


class Source:
    """Reports what a rank's models were loaded from, as long as they are unchanged since."""

    def __init__(self, loaded: list[str]) -> None:
        """`loaded`: `end_observing` of each model."""
        self._source = facts_digest([(one,) for one in loaded]) if loaded and all(loaded) else ""
        self._memory = ""

    def report(self, memory: str) -> str:
        """Return the rank's report, MEMORY or MEMORY=SOURCE, given the digest of its weights in memory now.

        The `memory` of the first call counts as what was loaded; with any other one the source is left out.
        """
        self._memory = self._memory or memory
        return f"{memory}{_MARK}{self._source}" if self._source and memory == self._memory else memory


class _Observed:
    """What was loaded into one model so far."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, ...]] = []
        self.loaded: set[str] = set()
        self.whole = False  # every parameter of the model was loaded, by calls that took all that they were given
        self.failed = False


_OBSERVED: Final[weakref.WeakKeyDictionary[torch.nn.Module, _Observed]] = weakref.WeakKeyDictionary()


def watch_loading(loader: Any) -> None:  # noqa: ANN401  (vLLM's module)
    """Observe what is loaded into models that are made from now on. Idempotent."""
    wrap(loader, "initialize_model", _made)


def _made(make: Callable[..., torch.nn.Module], vllm_config: VllmConfig, **kwargs: Any) -> torch.nn.Module:  # noqa: ANN401
    model = make(vllm_config, **kwargs)
    try:
        if _is_of_use(vllm_config, kwargs.get("model_config") or vllm_config.model_config):
            _observe(model)
    except Exception as error:  # noqa: BLE001  (the model must be loaded all the same)
        warn("weights_not_observed", error=repr(error))
    return model


def _is_of_use(config: VllmConfig, model: ModelConfig) -> bool:
    """Whether tiers are used, and what is loaded decides what is computed, however many ranks there are.

    A scale that a rank finds by itself, of its own part of the weights, is another for other ranks. What a loader or a
    worker that is not vLLM's does to a model while loading is not observed, nor are experts of other ranks that this
    rank does not read.
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
    """Whether only heads and experts are divided among ranks, not layers or tokens, and all ranks are in one engine."""
    sizes = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    alone = parallel.world_size == parallel.tensor_parallel_size and not sees_a_part(parallel)
    return alone and sizes == (1, 1)


def sees_a_part(parallel: ParallelConfig) -> bool:
    """Whether an engine's answers depend on experts in other engines (expert parallelism over data-parallel ranks)."""
    return parallel.enable_expert_parallel and parallel.data_parallel_size > 1


def _observe(model: torch.nn.Module) -> None:
    """Digest the tensors that are loaded into `model`, until `end_observing`."""
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
        except Exception as error:  # noqa: BLE001  (the model must be loaded all the same)
            observed.failed = True
            warn("weights_not_observed", tensor=name, error=repr(error))
        yield name, tensor


def end_observing(model: torch.nn.Module) -> str:
    """Stop observing `model`. Returns the digest of all that was loaded into it; "": not all was observed."""
    observed = _OBSERVED.pop(model, None)
    if observed is None:
        return ""
    del model.load_weights
    return facts_digest(observed.facts) if observed.whole and not observed.failed else ""


def end_all() -> None:
    """Stop observing all models."""
    for model in list(_OBSERVED):
        end_observing(model)
