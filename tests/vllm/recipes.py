"""Whether kvpipe would start with what public recipes ask for: each is put to what an engine's start asks.

Run `python -m tests.vllm.recipes`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import kvpipe.connectors.vllm.trial.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.config import load_settings
from kvpipe.connectors.vllm import drafters, support
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs
from kvpipe.errors import UnsupportedError
from kvpipe.testing import doc_tables

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

RECIPES, PAGE = Path(__file__).with_name("recipes.tsv"), Path(__file__).parents[2] / "docs" / "recipes.md"
HANDED_OVER: Final = "PD"
"""Prefill and decode in engines of their own, between which another connector carries KV."""
MATCH_UNIT: Final = "prefix-match-unit"
"""Hashes shorter than a block. Kimi K3's layers write states from within a step, on NVIDIA's devices."""


class Family(NamedTuple):
    """Recipes of one model. `shape`: a trial whose cache groups are of its kinds; `rests_on`: who has shown them."""

    names: tuple[str, ...]
    shape: str
    rests_on: str


FAMILIES: Final = {
    "DeepSeek V4": Family(("deepseek-v4", "dsv4"), "tails", "a real engine; drafts: vLLM's schedulers"),
    "Kimi K3": Family(
        ("kimi-k3", "kimik3"),
        "states",
        "engines of KDA and of MLA: together they start on no CPU; drafts: vLLM's schedulers",
    ),
    "MiniMax M3": Family(("minimax-m3",), "sync", "real engines of its kinds of caches, none of it"),
}


class Recipe(NamedTuple):
    """What one recipe asks for: `needs` are vLLM's features, of which `drafts:METHOD` is one."""

    family: str
    needs: frozenset[str]


def recipes() -> list[Recipe]:
    """Return all recipes of the table. Raises `LookupError` for one of an unknown family."""
    lines = [line for line in RECIPES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [_recipe(*line.split("\t")[:2]) for line in lines[1:]]


def _recipe(name: str, needs: str) -> Recipe:
    for family, (names, _, _) in FAMILIES.items():
        if any(one in name for one in names):
            return Recipe(family, frozenset(filter(None, needs.split(","))))
    raise LookupError(f"the recipe {name} is of no known family")


def refusal(recipe: Recipe) -> str:
    """Return the sentence with which kvpipe would refuse an engine of this recipe, or nothing."""
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
    """Return whether kvpipe would start, or why not."""
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
    head = "| model | asks for | recipes | would start | its caches rest on |\n|---|---|---|---|---|\n"
    sum_line = f"Of {whole} recipes that hand nothing over between engines kvpipe would start with {starts}.\n"
    return {"recipes": head + "".join(rows), "sum": sum_line}


if __name__ == "__main__":
    PAGE.write_text(doc_tables.fill(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
