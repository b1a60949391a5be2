"""Asks for each of vLLM's architectures whether kvpipe serves the architecture, and writes the page.

Run `python -m tests.contract.registry`.

Each architecture gets a model configuration of its family with few layers. vLLM makes the engine's configuration. The
model is built without memory for its weights (on the device "meta"). Its layers are then asked for the specifications
of their caches, as at an engine's start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock

from kvpipe.connectors.vllm.trial import doc_tables
from kvpipe.connectors.vllm.trial.processors import Processor, build, processor
from tests.contract.places import PLACES

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
ABSENT: Final = frozenset({"torchvision", "torchaudio", "timm", "terratorch"})
"""Modules that models import, but vLLM's CPU build lacks. A stand-in that has every attribute replaces each module."""

LAYERS: Final = 4
POOL: Final = "64TiB"
"""The size of a pool that is never allocated.

The size is large, because models that are not shrunk have large chunks.
"""

PROCESSOR: Final[Processor] = "avx512"
"""All answers are for this simulated processor, because with AMX vLLM refuses some models at other places."""

WORKS: Final = "served"
UNASKED: Final = "not built here"
_FAMILY = re.compile(
    r"(For(ConditionalGeneration|CausalLM|SequenceClassification|TokenClassification|MaskedLM)|LMHeadModel|Model)$"
)
_KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "MLA",
    "MambaSpec": "recurrent states",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked local attention",
}


class ArchitectureRow(NamedTuple):
    """The findings about one architecture."""

    architecture: str
    runner: str
    caches: str
    answer: str


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer of the modules in `ABSENT`."""

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Find a module of `ABSENT`."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module that has every attribute."""

        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return mock.MagicMock(name=name)

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


# ---- a configuration of each family ------------------------------------------------------------------------------


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _families() -> dict[str, str]:
    """Return the family of every architecture and plain name that transformers knows."""
    from transformers.models.auto import configuration_auto, modeling_auto
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    found = {_plain(family): family for family in (*configuration_auto.CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY)}
    for name, mapping in sorted(vars(modeling_auto).items()):
        if name.endswith("_MAPPING_NAMES"):
            for family, made in mapping.items():
                for architecture in (made,) if isinstance(made, str) else made:
                    found.setdefault(architecture, family)
    return found


def _configuration(architecture: str, module: str, families: dict[str, str]) -> PretrainedConfig:
    """Make a configuration of the architecture's family.

    Raises `LookupError` if no installed package knows the family.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    names = (architecture, _plain(_FAMILY.sub("", architecture)), _plain(module.rpartition(".")[2]))
    family = next((families[name] for name in names if name in families), None)
    if family is None:
        raise LookupError(architecture)
    kind: Any = _CONFIG_REGISTRY[family] if family in _CONFIG_REGISTRY else CONFIG_MAPPING[family]
    try:
        made = kind(num_hidden_layers=LAYERS)
    except Exception:  # noqa: BLE001  (some count their layers otherwise)
        made = kind()
    made.architectures = [architecture]
    return made  # type: ignore[no-any-return]


# ---- asking ------------------------------------------------------------------------------------------------------


def _engine(configuration: PretrainedConfig, folder: str) -> VllmConfig:
    """Return vLLM's configuration of an engine with this model and kvpipe."""
    from vllm.engine.arg_utils import EngineArgs

    configuration.save_pretrained(folder)
    transfer: Any = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both"}
    options: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True, "dtype": "bfloat16", "block_size": 32}
    made = EngineArgs(folder, tokenizer=folder, skip_tokenizer_init=True, kv_transfer_config=transfer, **options)
    config = made.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def _caches(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Build the model without memory, and return the specifications of its layers' caches."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    build(config)
    with set_current_vllm_config(config):
        layers = config.compilation_config.static_forward_context
        specs = {
            name: layer.get_kv_cache_spec(config)
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
        }
    return {name: spec for name, spec in specs.items() if spec is not None}


def _kinds(specs: dict[str, KVCacheSpec]) -> str:
    names = sorted({type(spec).__name__ for spec in specs.values()})
    return ", ".join(_KINDS.get(name, f"`{name}`") for name in names) or "none"


def _ask(config: VllmConfig) -> tuple[str, str]:
    """Return the kinds of caches of the engine's model, and kvpipe's answer at the engine's start."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config.settings import Settings
    from kvpipe.connectors.vllm import support
    from kvpipe.errors import UsageError

    try:
        support.check_engine(config)
    except UsageError as e:
        return "", str(e)
    specs = _caches(config)
    try:
        groups = get_kv_cache_groups(config, specs) if specs else []
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        support.make_geometry(cache, Settings.model_validate({"pool_bytes_max": POOL}))
    except UsageError as e:
        return _kinds(specs), re.sub(r"layer '[^']*'", "a layer", re.sub(r", group \d+", "", str(e)))
    return _kinds(specs), WORKS


def walk(only: Sequence[str] = ()) -> Iterator[ArchitectureRow]:
    """Ask for every architecture of vLLM's registry, or for `only` these. Draft models are left out."""
    from vllm.model_executor.models import registry

    # Without this, each inspection would start a new process.
    registry._LazyRegisteredModel.inspect_model_cls = (  # type: ignore[method-assign]
        lambda model: registry._ModelInfo.from_model_cls(model.load_model_cls())
    )
    families, finder = _families(), _StandIn()
    sys.meta_path.append(finder)
    try:
        for architecture, (module, _) in sorted(served().items()):
            if only and architecture not in only:
                continue
            runner, caches, answer = "", "", UNASKED
            try:
                with tempfile.TemporaryDirectory() as folder, processor(PROCESSOR):
                    config = _engine(_configuration(architecture, module, families), folder)
                    runner = str(config.model_config.runner_type)
                    caches, answer = _ask(config)
            except Exception as e:  # noqa: BLE001  (whatever vLLM or the family's code raises)
                sys.stderr.write(f"{architecture}: {e!r}\n")
            yield ArchitectureRow(architecture, runner, caches, answer)
    finally:
        sys.meta_path.remove(finder)


def served() -> dict[str, tuple[str, str]]:
    """Return vLLM's architectures without draft models, with their module and class."""
    from vllm.model_executor.models import registry

    drafts = registry._SPECULATIVE_DECODING_MODELS
    return {name: at for name, at in registry._VLLM_MODELS.items() if name not in drafts}  # type: ignore[misc]


# ---- the page ----------------------------------------------------------------------------------------------------


def architectures_table(rows: Sequence[ArchitectureRow]) -> str:
    """Return one line per answer, with the architectures that get this answer."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        grouped.setdefault((row.answer, row.caches, row.runner), []).append(row.architecture)
    order = sorted(grouped, key=lambda key: (key[0] != WORKS, key[0] == UNASKED, key))
    lines = ["| answer | caches | as | architectures |", "|---|---|---|---|"]
    for key in order:
        names = ", ".join(f"`{name}`" for name in sorted(grouped[key]))
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {names} |")
    return "\n".join(lines) + "\n"


def places_table() -> str:
    """Return one line per place in vLLM, with kvpipe's answer."""
    lines = ["| where vLLM states it | what kvpipe does |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{place}` | {made} |" for place, made in sorted(PLACES.items()))]) + "\n"


def fill(text: str, rows: Sequence[ArchitectureRow]) -> str:
    """Return the page's text with new tables."""
    return doc_tables.fill_tables(text, {"architectures": architectures_table(rows), "places": places_table()})


if __name__ == "__main__":
    DOCS.write_text(fill(DOCS.read_text(encoding="utf-8"), list(walk())), encoding="utf-8")
    sys.stdout.write(f"{DOCS}\n")
