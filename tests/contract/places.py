"""Finds, by `ast`, the places in vLLM's sources that exclude a prefix cache, because answers would be wrong.

`PLACES` has kvpipe's answer to each place. If a release has a place that is not in `PLACES`, a test fails until a
developer has read the code and added an answer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SIGNS: Final = ("enable_prefix_caching", "is_prefix_caching_supported", "non_causal", "prefix_cacheable")
"""A source is read only if it contains at least one of these strings."""

_OURS = "refused in `connectors/vllm/identity/models.py`: "
_SPEC = "refused by `make_geometry` if a layer's specification is not `prefix_cacheable`"
_CACHE = "v1/kv_cache_interface.py"


PLACES: Final[dict[str, str]] = {
    "config/model.py:ModelConfig.is_prefix_caching_supported": f"{_OURS}`is_prefix_caching_supported`",
    "config/vllm.py:VllmConfig.__post_init__": f"{_OURS}`mm_encoder_only`",
    "engine/arg_utils.py:EngineArgs._set_default_chunked_prefill_and_prefix_caching_args": (
        f"the default is `is_prefix_caching_supported`, which kvpipe checks directly; {_OURS}`riscv`"
    ),
    "model_executor/layers/attention/attention.py:Attention.__init__": f"{_OURS}`batch_invariance`",
    "model_executor/layers/attention/mla_attention.py:MLAAttention.__init__": f"{_OURS}`batch_invariance`",
    "model_executor/layers/attention/prefill_prefix_lm_attention.py:PrefillPrefixLMAttention.get_kv_cache_spec": (
        f"{_OURS}`non_causal`"
    ),
    "model_executor/models/config.py:UnlimitedOCRForCausalLMConfig.verify_and_update_config": f"{_OURS}`rswa`",
    "platforms/cpu.py:CpuPlatform.check_and_update_config": (
        "served (MLA on a CPU without AMX, where vLLM also disables chunked prefill): loaded KV is equal to computed "
        "KV, but vLLM computes other answers behind a hit, in its own prefix cache too"
    ),
    "v1/engine/core.py:EngineCore._initialize_kv_caches": f"{_OURS}`non_causal`",
    f"{_CACHE}:CircularBufferSpec.prefix_cacheable": _SPEC,
    f"{_CACHE}:HiSparseHotSpec.prefix_cacheable": _SPEC,
    f"{_CACHE}:HiSparseResidentSpec.prefix_cacheable": _SPEC,
    f"{_CACHE}:KVCacheSpec.prefix_cacheable": _SPEC,
    f"{_CACHE}:SlidingWindowMLASpec.prefix_cacheable": _SPEC,
    f"{_CACHE}:UniformTypeKVCacheSpecs.prefix_cacheable": _SPEC,
}
"""The answer of kvpipe to each place, by file and function."""


def scan(folder: Path) -> dict[str, int]:
    """Return the number of places in each function of vLLM's package in `folder`, by file and function."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] == "benchmarks":
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if any(sign in source for sign in SIGNS):
            for name in _messages(ast.parse(source)):
                key = f"{path.relative_to(folder).as_posix()}:{name}"
                found[key] = found.get(key, 0) + 1
    return found


def _messages(tree: ast.Module) -> Iterator[str]:
    """Yield the function around each place in `tree`."""
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{name}.{node.name}" if name else node.name
            if node.name in {"is_prefix_caching_supported", "prefix_cacheable"}:
                yield name
        if _switches_off(node):
            yield name
        stack += [(name, child) for child in ast.iter_child_nodes(node)]


def _switches_off(node: ast.AST) -> bool:
    """Whether `node` sets `….enable_prefix_caching = False`, or makes a specification with `non_causal=True`."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        off = isinstance(node.value, ast.Constant) and node.value.value is False
        return off and any(isinstance(t, ast.Attribute) and t.attr == "enable_prefix_caching" for t in targets)
    if isinstance(node, ast.keyword):
        return node.arg == "non_causal" and isinstance(node.value, ast.Constant) and node.value.value is True
    return False
