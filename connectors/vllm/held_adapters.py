"""Records the LoRA adapters that vLLM loads in this process, for the worker side.

vLLM loads all adapters through `WorkerLoRAManager._load_adapter`, either ahead of time, or in a request's step before
the step's metadata is bound. vLLM loads an adapter again after an eviction, or to replace the adapter. Each loaded
adapter carries the digest of its files. If the files changed during the load, the loaded version is unknown. The
adapter then gets a random digest, so that no other engine shares its KV.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from kvpipe.threads.adapter_files import read_as
from kvpipe.worker.adapters import HeldAdapters, Loaded

MARK: Final = "kvpipe_loaded"
ORIGINAL: Final = "kvpipe_original"


def record_loads(held: HeldAdapters) -> None:
    """Record in `held` every adapter that vLLM loads in this process from now on.

    After a load, `held.now` returns the digests of all adapters that vLLM's manager holds.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415  (imports models)

    original: Any = getattr(WorkerLoRAManager._load_adapter, ORIGINAL, WorkerLoRAManager._load_adapter)  # noqa: SLF001
    mine = weakref.ref(held)

    @functools.wraps(original)
    def load(manager: Any, request: Any) -> Any:  # noqa: ANN401
        held = mine()
        return original(manager, request) if held is None else _load(held, original, manager, request)

    setattr(load, ORIGINAL, original)
    WorkerLoRAManager._load_adapter = load  # type: ignore[method-assign]  # noqa: SLF001


def _load(held: HeldAdapters, original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
    """Load an adapter with vLLM's own function, and record the digest of the adapter's files."""
    folder, resolved = _resolved(request)
    before = held.read(folder)
    adapter = original(manager, resolved)
    digest = before.digest if before is not None and before == held.read(folder) else secrets.token_bytes(16)
    digest = read_as(digest, fused=request.is_3d_lora_weight)
    one = Loaded(request.lora_int_id, request.lora_name, request.lora_path, digest)
    setattr(adapter, MARK, one)
    held.now = _marks(manager)
    held.loaded(one)
    return adapter


def _marks(manager: Any) -> Callable[[], dict[int, bytes]]:  # noqa: ANN401
    """Return a function that returns the digests of the manager's adapters by number, or {} without the manager."""
    known = weakref.ref(manager)

    def now() -> dict[int, bytes]:
        alive = known()
        there = alive._adapter_manager.list_adapters() if alive is not None else {}  # noqa: SLF001
        marks = ((number, getattr(adapter, MARK, None)) for number, adapter in there.items())
        return {number: mark.digest for number, mark in marks if mark is not None}

    return now


def _resolved(request: Any) -> tuple[str, Any]:  # noqa: ANN401
    """Return (the adapter's folder, a request with that folder as path), so that vLLM queries a hub only once."""
    from vllm.lora.utils import get_adapter_absolute_path  # noqa: PLC0415

    folder = get_adapter_absolute_path(request.lora_path)
    if Path(folder).is_dir() and not Path(request.lora_path).expanduser().exists():
        return folder, msgspec.structs.replace(request, lora_path=folder)
    return folder, request
