"""The checked paged caches of a rank, with each layer's name and number. A rank's worker side needs these caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from kvpipe.errors import UnsupportedError
from kvpipe.protocol.geometry import Geometry
from kvpipe.transfer.pages import PageView, view_pages
from kvpipe.transfer.whole_blocks import whole_blocks

LayerT = TypeVar("LayerT", str, int)
"""How `Hooks` refers to a layer: by its name or by its number."""


class Hooks(NamedTuple, Generic[LayerT]):
    """The hooks that an engine calls around a forward. `unhooked` has the layers for which the engine calls no hook.

    `replayed(forward)`, with the engine's object for a forward, returns whether the step is replayed from a CUDA graph,
    without hooks. If `replayed` is None, no step is replayed. `fences_late` says whether the engine calls
    `handle_preemptions` before a step writes anything.
    """

    unhooked: frozenset[LayerT] = frozenset()
    replayed: Callable[[Any], bool] | None = None
    fences_late: bool = False


EVERY_HOOK: Hooks[Any] = Hooks()
"""The hooks of an engine that calls a hook for every layer of every step.

Such an engine begins the writes of the next step only after `end_step`.
"""


class PagedCaches:
    """The caches of one rank, in the order of the geometry's layers.

    If no layer has a hook and blocks can be copied whole (`whole`), then each cache group counts as one layer in
    `geometry`, `views`, `index` and `hooks`.
    """

    def __init__(
        self, geometry: Geometry, tensors: Mapping[str, torch.Tensor], blocks: int, hooks: Hooks[str] = EVERY_HOOK
    ) -> None:
        """`tensors` has the caches by layer name, each [blocks * r, H, N, C] (`PageView`).

        A layer that is not in `geometry` may share the cache of a layer in `geometry`.

        Raises:
            UnsupportedError: a layer is missing, its blocks are larger than specified, or its layout is not known.

        """
        layers = [layer for group in geometry.groups for layer in group.layers]
        views: list[PageView] = []
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
            views.append(view)
        self.tensors, self.blocks = tensors, blocks
        self.index = {layer.name: number for number, layer in enumerate(layers)}
        known = {(view.base, view.page_bytes) for view in views}
        self.aliases = frozenset(
            name
            for name, tensor in tensors.items()
            if name not in self.index and (tensor.data_ptr(), view_pages(name, tensor, blocks).page_bytes) in known
        )
        self._given = geometry, hooks
        whole = whole_blocks(geometry, views) if hooks.unhooked.issuperset(self.index) else None
        self.whole = whole is not None
        self.geometry, self.views = whole or (geometry, tuple(views))
        if whole:
            self.index = {layer.name: number for number, group in enumerate(geometry.groups) for layer in group.layers}
        unhooked = frozenset(number for name, number in self.index.items() if name in hooks.unhooked)
        self.hooks = Hooks(unhooked, hooks.replayed, hooks.fences_late)

    @property
    def device(self) -> str:
        """The type of device that has the caches in its memory."""
        return self.views[0].tensor.device.type

    def again(self, tensors: Mapping[str, torch.Tensor] | None) -> PagedCaches:
        """Return the same caches at other addresses, or as other `tensors`. Raises the errors of the constructor."""
        geometry, hooks = self._given
        return PagedCaches(geometry, self.tensors if tensors is None else tensors, self.blocks, hooks)
