"""A rank's paged caches, as its side is made of them: checked, each layer known by its name and its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from kvpipe.errors import UnsupportedError
from kvpipe.geometry import Geometry
from kvpipe.transfer.pages import view_pages


class Hooks(NamedTuple):
    """What an engine calls of a worker side around a forward. `unhooked`: layers for which no hook will be called.

    `replayed`: returns whether a step is replayed from a CUDA graph, without hooks, by the engine's `context` of its
    forward; None: none is.
    `fences_late`: `handle_preemptions` is called before a step writes anything.
    """

    unhooked: frozenset[str] = frozenset()
    replayed: Callable[[Any], bool] | None = None
    fences_late: bool = False


EVERY_HOOK = Hooks()
"""Those of an engine that calls a hook for every layer of every step, and orders a step's writes behind `end_step`."""


class PagedCaches:
    """The caches of one rank, in the order of the geometry's layers."""

    def __init__(
        self, geometry: Geometry, tensors: Mapping[str, torch.Tensor], blocks: int, hooks: Hooks = EVERY_HOOK
    ) -> None:
        """`tensors`: by layer name, [blocks * r, H, N, C] (`PageView`); others may share one of these caches.

        Raises:
            UnsupportedError: a layer is missing, its blocks are larger than specified, or its layout is not known.

        """
        layers = [layer for group in geometry.groups for layer in group.layers]
        self.views = []
        for layer in layers:
            if layer.name not in tensors:
                msg = f"kvpipe: the engine registered no KV cache for layer {layer.name!r}; this model cannot be served"
                raise UnsupportedError(msg)
            view = view_pages(layer.name, tensors[layer.name], blocks)
            if view.page_bytes > layer.page_bytes:
                msg = (
                    f"kvpipe: a block of layer {layer.name!r} has {view.page_bytes} bytes, its specification has "
                    f"{layer.page_bytes}; this attention backend cannot be served"
                )
                raise UnsupportedError(msg)
            self.views.append(view)
        self.blocks, self.hooks = blocks, hooks
        self.index = {layer.name: number for number, layer in enumerate(layers)}
        self.unhooked = frozenset(number for name, number in self.index.items() if name in hooks.unhooked)
        known = {(view.base, view.page_bytes) for view in self.views}
        self.aliases = frozenset(
            name
            for name, tensor in tensors.items()
            if name not in self.index and (tensor.data_ptr(), view_pages(name, tensor, blocks).page_bytes) in known
        )

    @property
    def device(self) -> str:
        """The type of device that they lie on."""
        return self.views[0].tensor.device.type
