"""From which weights a model was loaded: whole tensors, as they were before ranks have taken their parts of them.

What lies in a rank's memory says nothing about another number of ranks: parts are of other shapes, packed and padded.
But every rank is given the same tensors to take its part of, and they are read here on their way into the model. What
they come to stands for what is in memory as long as that is what it was when the model had just been loaded; as soon as
it is anything else, nobody knows what other ranks would have made of it.
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
    """`memory`: what lies in all ranks' memory, in their order. `source`: what it was loaded from; empty: unknown."""

    memory: str
    source: str


def loaded_from(told: str) -> LoadedFrom:
    """Read what ranks have told of their weights, with ':' between them: each its memory, and '=' and its source."""
    parts = [one.partition(_MARK) for one in told.split(":")]
    sources = {source for _, _, source in parts}
    return LoadedFrom(":".join(memory for memory, _, _ in parts), sources.pop() if len(sources) == 1 else "")


class Source:
    """What a rank's models were loaded from."""

    def __init__(self, heard: list[str]) -> None:
        """`heard`: of each model, empty where it is unknown."""
        self._source = facts_digest([(one,) for one in heard]) if heard and all(heard) else ""
        self._memory = ""

    def told(self, memory: str) -> str:
        """Return what to tell of weights that come to `memory` now. What is in memory at first is what was loaded."""
        self._memory = self._memory or memory
        return f"{memory}{_MARK}{self._source}" if self._source and memory == self._memory else memory


class _Heard:
    """What has gone into one model."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, ...]] = []
        self.loaded: set[str] = set()
        self.whole = False  # every parameter of the model was loaded, by calls that took all that they were given
        self.failed = False


_HEARD: Final[weakref.WeakKeyDictionary[torch.nn.Module, _Heard]] = weakref.WeakKeyDictionary()


def watch_loading(loader: Any) -> None:  # noqa: ANN401  (vLLM's module)
    """Listen to what is loaded into models that are made from now on. Idempotent."""
    wrap(loader, "initialize_model", _made)


def _made(make: Callable[..., torch.nn.Module], vllm_config: VllmConfig, **kwargs: Any) -> torch.nn.Module:  # noqa: ANN401
    model = make(vllm_config, **kwargs)
    try:
        if _is_of_use(vllm_config, kwargs.get("model_config") or vllm_config.model_config):
            _listen(model)
    except Exception as error:  # noqa: BLE001  (the model must be loaded all the same)
        warn("weights_not_heard", error=repr(error))
    return model


def _is_of_use(config: VllmConfig, model: ModelConfig) -> bool:
    """Whether tiers are used, and what is loaded decides what is computed, however many ranks there are.

    A scale that a rank finds by itself, of its own part of the weights, is another for other ranks. What a loader or a
    worker that is not vLLM's does to a model when its weights are loaded is not heard, nor are experts of other ranks
    that nobody reads here.
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
    """Whether nothing but heads and experts is spread over ranks: no layers, no tokens, and all of it in one engine."""
    sizes = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    alone = parallel.world_size == parallel.tensor_parallel_size and not sees_a_part(parallel)
    return alone and sizes == (1, 1)


def sees_a_part(parallel: ParallelConfig) -> bool:
    """Whether an engine's answers depend on experts that lie in other engines."""
    return parallel.enable_expert_parallel and parallel.data_parallel_size > 1


def _listen(model: torch.nn.Module) -> None:
    """Read whatever is loaded into `model`, until `end_listening`."""
    load: Callable[..., set[str] | None] = model.load_weights  # type: ignore[assignment]
    heard = _HEARD[model] = _Heard()

    def listening(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> set[str] | None:  # noqa: ANN401
        rest = _passing(heard, weights)
        loaded = load(rest, *args, **kwargs)
        heard.failed |= next(rest, None) is not None or loaded is None
        heard.loaded |= loaded or set()
        heard.whole = {name for name, _ in model.named_parameters()} <= heard.loaded
        return loaded

    model.load_weights = listening  # type: ignore[assignment]


def _passing(heard: _Heard, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        try:
            heard.facts += tensor_facts(name, tensor)
        except Exception as error:  # noqa: BLE001  (the model must be loaded all the same)
            heard.failed = True
            warn("weights_not_heard", tensor=name, error=repr(error))
        yield name, tensor


def end_listening(model: torch.nn.Module) -> str:
    """Return what `model` was loaded from; empty: it is unknown. What is loaded later is not heard."""
    heard = _HEARD.pop(model, None)
    if heard is None:
        return ""
    del model.load_weights
    return facts_digest(heard.facts) if heard.whole and not heard.failed else ""


def end_all() -> None:
    """Listen to nothing any more."""
    for model in list(_HEARD):
        end_listening(model)
