"""Digests how an engine prepares media for its model, because vLLM's hashes cover only the media's bytes.

The parts of a media processor are described as plain data that is equal in every process. A description contains no
addresses, no order of sets and no module paths of classes. Parts that cannot be described (closures, code) are
identified by the files of the model's folder and by the hub's commit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOT_OF_BYTES: Final = frozenset(("_name_or_path", "name_or_path", "transformers_version"))
"""Keys of a model's configuration that do not change the KV: the model's path, and the library that wrote the file."""

DEPTH_MAX: Final = 24
"""The deepest nesting of parts that are described. Deeper parts are described by their types alone."""

_NOT_OF_MEDIA: Final = frozenset(("cache", "hasher", "ipc", "limit", "profiling", "shm"))
"""A multimodal setting of vLLM does not change a model's input if one of these words is in the setting's name."""

_TYPE_IS_ENOUGH: Final = frozenset(("Logger", "PreTrainedTokenizerBase", "Tokenizer", "TokenizerLike", "VllmConfig"))
"""Classes that are described by their type alone, because other facts cover tokens and the engine's settings."""

_UNCUT: Final = "spans are whole"

_FILES: Final = ("*processor*.json", "*.py")


def media_facts(config: VllmConfig) -> str:
    """Return a digest of how media are prepared, or "" for a text model.

    A part that raises is replaced by its error.
    """
    model = config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None or multimodal.language_model_only:
        return ""

    def processor() -> object:
        from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: PLC0415  (slow, and for few models)

        return MULTIMODAL_REGISTRY.create_processor(model).info.get_hf_processor()

    settings = {name: value for name, value in vars(multimodal).items() if not _NOT_OF_MEDIA & {*name.split("_")}}
    code = model.revision, getattr(model.hf_config, "_commit_hash", None)
    texts = [described(lambda: settings), described(lambda: (*code, _files(Path(model.model)))), described(processor)]
    if model.is_mm_prefix_lm:  # excludes KV of older versions of kvpipe, in which steps could split an image
        texts.append(_UNCUT)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def described(make: Callable[[], object]) -> str:
    """Return the result of `make` as JSON that is equal in every process, or the name of the error that it raises."""
    try:
        return json.dumps(_Description().describe(make()))
    except Exception as error:  # noqa: BLE001  (some models have no processor, and a description may fail in other ways)
        return type(error).__name__


def _files(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a model's folder that define how media are prepared."""
    return {path.name: _digest(path) for pattern in _FILES for path in sorted(folder.glob(pattern))}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return type(error).__name__


def _array(part: np.ndarray[Any, Any]) -> tuple[object, ...]:
    values = tuple(part.flat) if part.dtype.hasobject else hashlib.sha256(part.tobytes()).hexdigest()
    return str(part.dtype), part.shape, values


def _tensor(part: torch.Tensor) -> tuple[object, ...]:
    data = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(part.dtype), tuple(part.shape), hashlib.sha256(data).hexdigest()


_DESCRIBED_AS: Final[tuple[tuple[Any, Callable[[Any], object]], ...]] = (
    (Enum, lambda part: (type(part).__qualname__, part.name)),
    ((NoneType, str, int, float, tuple), lambda part: part),
    ((bytes, bytearray), lambda part: ("bytes", part.hex())),
    ((complex, np.generic, np.dtype, torch.dtype, torch.device), str),
    (np.ndarray, _array),
    (torch.Tensor, _tensor),
    (re.Pattern, lambda part: (part.pattern, part.flags)),
    (PurePath, lambda part: part.name),
    ((type, FunctionType, BuiltinFunctionType, MethodType), lambda part: part.__qualname__),
    (ModuleType, lambda part: part.__name__),
    (functools.partial, lambda part: ("partial", part.func, part.args, part.keywords)),
)
"""By types, a function that describes a part of these types: as plain data, or as a tuple of other parts."""


class _Description:
    """Describes a part and all parts inside it. If a part occurs again, only its number is repeated."""

    def __init__(self) -> None:
        self._described: dict[int, tuple[int, object]] = {}
        """By a part's id: its number and the part itself, which is kept alive so that no id is reused."""

    def describe(self, part: Any, depth: int = 0) -> Any:  # noqa: ANN401
        """Return `part` as plain data."""
        sentence = next((sentence for kinds, sentence in _DESCRIBED_AS if isinstance(part, kinds)), None)
        if sentence is not None:
            message = sentence(part)
            return [self.describe(one, depth) for one in message] if isinstance(message, tuple) else message
        if depth > DEPTH_MAX:
            return {"type": type(part).__qualname__}
        if id(part) in self._described:
            return {"again": self._described[id(part)][0]}
        self._described[id(part)] = len(self._described), part
        return self._whole(part, depth + 1)

    def _whole(self, part: Any, depth: int) -> Any:  # noqa: ANN401
        if isinstance(part, list):
            return [self.describe(one, depth) for one in part]
        if isinstance(part, (set, frozenset)):  # has no order, so only the types of complex members count
            return {"set": sorted((self.describe(one, DEPTH_MAX + 1) for one in part), key=json.dumps)}
        if isinstance(part, Mapping):
            return {"items": self._pairs(part, depth)}
        kinds = type(part).__mro__
        own: dict[str, Any] = {}
        if not _TYPE_IS_ENOUGH.intersection(kind.__name__ for kind in kinds):
            slots = [slot for kind in kinds for slot in _slots(kind) if hasattr(part, slot)]
            own = getattr(part, "__dict__", {}) | {slot: getattr(part, slot) for slot in slots}
        own = {name: value for name, value in own.items() if name not in NOT_OF_BYTES}
        return {"type": type(part).__qualname__, "own": self._pairs(own, depth)}

    def _pairs(self, parts: Mapping[Any, Any], depth: int) -> list[list[Any]]:
        return sorted(
            ([self.describe(key, depth), self.describe(value, depth)] for key, value in parts.items()), key=_key
        )


def _key(pair: list[Any]) -> str:
    return json.dumps(pair[0])


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(slot for slot in ([slots] if isinstance(slots, str) else slots) if not slot.startswith("__"))
