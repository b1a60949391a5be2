"""Finds out whether kvpipe would start with each public recipe, by the checks of an engine's start.

Run `python -m tests.vllm.recipes`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import kvpipe.connectors.vllm.tiny.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm import support
from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.trial import doc_tables
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs
from kvpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

RECIPES, PAGE = Path(__file__).with_name("recipes.tsv"), Path(__file__).parents[2] / "docs" / "recipes.md"
HANDED_OVER: Final = "PD"
"""The feature of recipes that prefill in one engine and decode in another. Another connector transfers the KV."""
MATCH_UNIT: Final = "prefix-match-unit"
"""Hashes are shorter than a block. On NVIDIA's devices, Kimi K3's layers write states during a step."""


class Family(NamedTuple):
    """The recipes of one model. `shape` names a shape with the model's kinds of cache groups.

    `rests_on` names the evidence.
    """

    names: tuple[str, ...]
    shape: str
    rests_on: str


FAMILIES: Final = {
    "DeepSeek V4": Family(("deepseek-v4", "dsv4"), "tails", "a real engine; drafts: vLLM's schedulers"),
    "Kimi K3": Family(
        ("kimi-k3", "kimik3"),
        "states",
        "an engine with KDA, and an engine with MLA (no CPU runs both in one engine); drafts: vLLM's schedulers",
    ),
    "MiniMax M3": Family(("minimax-m3",), "sync", "real engines with the same kinds of caches, but not this model"),
}


class Recipe(NamedTuple):
    """One recipe of a model.

    `needs` names the features of vLLM that the recipe uses, among them the drafter as `drafts:METHOD`.
    """

    family: str
    needs: frozenset[str]


def recipes() -> list[Recipe]:
    """Return all recipes of the table. Raises `LookupError` for a recipe of an unknown family."""
    lines = [line for line in RECIPES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [_recipe(*line.split("\t")[:2]) for line in lines[1:]]


def _recipe(name: str, needs: str) -> Recipe:
    for family, (names, _, _) in FAMILIES.items():
        if any(one in name for one in names):
            return Recipe(family, frozenset(filter(None, needs.split(","))))
    raise LookupError(f"the recipe {name} is of no known family")


def refusal(recipe: Recipe) -> str:
    """Return the message with which kvpipe would refuse an engine of this recipe, or ""."""
    config, cache = _configured(recipe)
    try:
        support.check_engine(config)
        dcp = config.parallel_config.decode_context_parallel_size
        settings = load_settings({"chunk_tokens": 256})
        drafted = drafters.ahead_tokens(config), dcp, drafters.states_back(config)
        geometry = support.make_geometry(cache, settings, *drafted)
        if geometry.states:
            drafters.check_states(config)
        support.hash_tokens(cache, geometry)
    except UnsupportedError as error:
        return str(error).removeprefix("kvpipe: ")
    return ""


def _configured(recipe: Recipe) -> tuple[VllmConfig, KVCacheConfig]:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    as_on_gpus = SHAPES[FAMILIES[recipe.family].shape]._replace(asynchronous=True, v2=True)
    config, cache = copy.deepcopy(make_configs(as_on_gpus))
    parallel = config.parallel_config
    parallel.pipeline_parallel_size = 2 if "PP" in recipe.needs else 1
    parallel.decode_context_parallel_size = 2 if "DCP" in recipe.needs else 1
    parallel.data_parallel_size = 2 if "DP" in recipe.needs else 1
    parallel.enable_expert_parallel = "EP" in recipe.needs
    parallel.world_size = 2 * parallel.pipeline_parallel_size
    for method in (need.partition(":")[2] for need in recipe.needs if need.startswith("drafts:")):
        drafts: Any = copy.deepcopy(make_configs(SHAPES["drafter"])[0].speculative_config)
        drafts.method = method
        config.speculative_config = drafts
    for group in cache.kv_cache_groups:
        if hasattr(group.kv_cache_spec, "mamba_type"):
            kind: dict[str, Any] = {
                "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
                "num_prefill_checkpoint_blocks": 1,
            }
            group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **kind)
    if MATCH_UNIT in recipe.needs:
        half = cache.kv_cache_groups[0].kv_cache_spec.block_size // 2
        cache.hash_block_size = cache.cache_hit_alignment_tokens = half
    return config, cache


def answer(recipe: Recipe) -> str:
    """Return whether kvpipe would start, or the reason why kvpipe would refuse."""
    why = refusal(recipe)
    return f"no: {why}" if why else "yes"


def tables() -> dict[str, str]:
    """Return the tables of the page."""
    counted = Counter(recipes())
    rows, starts, whole = [], 0, 0
    for recipe, count in sorted(counted.items(), key=lambda one: (one[0].family, sorted(one[0].needs))):
        stated, alone = answer(recipe), 0 if HANDED_OVER in recipe.needs else count
        starts, whole = starts + alone * stated.startswith("yes"), whole + alone
        needs = ", ".join(sorted(recipe.needs))
        rows.append(f"| {recipe.family} | {needs} | {count} | {stated} | {FAMILIES[recipe.family].rests_on} |\n")
    head = "| model | needs | recipes | would start | evidence for its caches |\n|---|---|---|---|---|\n"
    sum_line = f"kvpipe would start with {starts} of the {whole} recipes that do not transfer KV between engines.\n"
    return {"recipes": head + "".join(rows), "sum": sum_line}


if __name__ == "__main__":
    PAGE.write_text(doc_tables.fill_tables(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
