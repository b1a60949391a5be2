"""Digests the weights of the model that a rank has loaded, and observes changes of the weights in this process.

KV depends on the weights in memory, not on the model's files, because the files may have changed since loading. CPU
kernels keep packed weights that cannot be read, so a layer's weights are read just before vLLM packs them.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from kvpipe.connectors.vllm.identity.digest import facts_digest, tensors_digest
from kvpipe.connectors.vllm.identity.source import Source, end_all, end_observing, watch_loading
from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.trace.log import warn


class LayerDigest(NamedTuple):
    """The digest of a layer's weights before vLLM packs them for its kernels, and the names of non-empty weights."""

    digest: str
    names: frozenset[str]


_PACKED: Final[weakref.WeakKeyDictionary[torch.nn.Module, LayerDigest]] = weakref.WeakKeyDictionary()

_KNOWN: Final = frozenset(("torch", "vllm"))
"""Top-level packages that `LoadedModel.code` leaves out, because other facts cover them."""


def watch_packing() -> None:
    """From now on, digest weights before vLLM packs them. Idempotent. Call this before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader  # noqa: PLC0415  (slow)

    wrap(base_loader, "process_weights_after_loading", _pack_model)
    watch_loading(base_loader)


def _pack_model(pack: Callable[..., object], model: torch.nn.Module, *args: object, **kwargs: object) -> object:
    for module in model.modules():
        _watch_layer(module)
    return pack(model, *args, **kwargs)


def _watch_layer(module: torch.nn.Module) -> None:
    """Wrap the method that packs the layer's weights after every load."""
    method = getattr(module, "quant_method", None)
    if getattr(method, "process_weights_after_loading", None) is not None:
        wrap(method, "process_weights_after_loading", _pack_layer)


def _pack_layer(pack: Callable[..., object], layer: torch.nn.Module, *args: object, **kwargs: object) -> object:
    try:
        own = list(_own(layer))
        names = frozenset(name for name, tensor in own if tensor.numel())
        if names and (layer not in _PACKED or names >= _PACKED[layer].names):  # a smaller set: already packed
            _PACKED[layer] = LayerDigest(tensors_digest(own), names)
    except Exception as error:  # noqa: BLE001  (the model must be loaded nevertheless)
        _PACKED.pop(layer, None)
        warn("weights_not_read", layer=type(layer).__name__, error=repr(error))
    return pack(layer, *args, **kwargs)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


class LoadedModel:
    """The model to which the attention layers of an engine belong."""

    def __init__(self, layers: dict[str, Any], changed: Callable[[], object]) -> None:
        """Find the model of `layers`, vLLM's attention layers by name.

        `changed` is called when weights are loaded in this process. vLLM passes no model to a connector, and its
        runners keep the model in different places. Therefore the model is searched among the objects of the garbage
        collector. The model is the module that contains the layers and is in no other module. Make this object before
        vLLM freezes its objects, because the collector does not list frozen objects.
        """
        wanted = {id(layer) for layer in layers.values() if isinstance(layer, torch.nn.Module)}
        modules = [] if not wanted else [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        held = {id(child) for module in modules for child in module._modules.values()}  # noqa: SLF001
        tops = [one for one in modules if id(one) not in held]
        inside = {id(top): wanted & {id(module) for module in top.modules()} for top in tops}
        self.roots = [top for top in tops if inside[id(top)]]
        if not wanted or set().union(*inside.values()) != wanted:
            self.roots = []
        self._source = Source([end_observing(root) for root in self.roots])
        end_all()
        for root in self.roots:
            _watch_root(root, changed)

    def code(self) -> str:
        """Return a digest of the modules' code outside of vLLM and torch, such as a model's folder or a plugin."""
        files: set[str] = set()
        for name in {type(one).__module__ for root in self.roots for one in root.modules()}:
            if name.partition(".")[0] not in _KNOWN:
                file = getattr(sys.modules.get(name), "__file__", None)
                there = Path(file).read_bytes() if file and Path(file).is_file() else name.encode()
                files.add(hashlib.sha256(there).hexdigest())
                files.add(str(getattr(sys.modules.get(name.partition(".")[0]), "__version__", "")))
        return facts_digest([(one,) for one in files]) if files else ""

    def digest(self) -> str:
        """Return the report of the current weights, see `Source.digests`, or "" if the weights are not known.

        If computing the digest raises, later reports have no source digest, because the weights may have changed.
        """
        source, self._source = self._source, Source([])
        if not self.roots or any(_gone(module) for root in self.roots for module in root.modules()):
            return ""
        reported = sorted(tensors_digest(_named(root)) for root in self.roots)
        memory = reported[0] if len(reported) == 1 else tensors_digest((one, torch.empty(0)) for one in reported)
        self._source = source
        return source.digests(memory)


def _gone(module: torch.nn.Module) -> bool:
    """Whether the module's weights were packed before they were read."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: PLC0415  (slow)

    method, own = getattr(module, "quant_method", None), list(_own(module))
    if not own or module in _PACKED or not isinstance(method, QuantizeMethodBase):
        return False
    plain = type(method).__name__.startswith("Unquantized")  # a quantized method may leave only its scales
    return not plain or not any(tensor.numel() for _, tensor in own)


def _named(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    elsewhere = _elsewhere()
    for name, parameter in root.named_parameters():
        yield name, elsewhere.get(id(parameter), parameter)
    yield from root.named_buffers()
    for name, module in root.named_modules():
        if module in _PACKED:
            yield f"{name} {_PACKED[module].digest}", torch.empty(0)


def _elsewhere() -> dict[int, torch.Tensor]:
    """Return the weights that vLLM offloads to the host, by the id of the parameter to which they belong.

    The tensor of such a parameter is a buffer. vLLM copies the weights of one layer at a time into the buffer.
    """
    from vllm.model_executor.offloader import get_offloader  # noqa: PLC0415  (slow)

    layers = getattr(get_offloader(), "module_offloaders", ())
    kept = [one for layer in layers for one in layer._param_offloaders.values()]  # noqa: SLF001  (vLLM has no public function for this)
    return {id(one._param): one._cpu_storage for one in kept if one._cpu_storage is not None}  # noqa: SLF001


def _watch_root(root: torch.nn.Module, changed: Callable[[], object]) -> None:
    """Call `changed` when this process loads weights into the model other than through vLLM's calls to workers."""

    def watched(load: Callable[..., object], *args: object, **kwargs: object) -> object:
        changed()
        return load(*args, **kwargs)

    if getattr(root, "load_weights", None) is not None and wrap(root, "load_weights", watched):
        root.register_load_state_dict_post_hook(lambda _module, _keys: changed())  # type: ignore[no-untyped-call]
