"""kvpipe stores or refuses each kind of cache of every supported vLLM, as the page of kinds says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.errors import UnsupportedError
from tests.contract import kinds
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

PACKAGE = Path(vllm.__file__).parent
PLAIN = {"block_size": 32, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
MORE: dict[str, dict[str, Any]] = {
    "SlidingWindowSpec": {"sliding_window": 64},
    "SlidingWindowMLASpec": {"sliding_window": 64},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
    "RSWASpec": {"rswa_window": 64},
    "SinkFullAttentionSpec": {"sink_len": 32},
}


def _subclasses(kind: type[object]) -> set[str]:
    return {name for one in kind.__subclasses__() for name in (one.__name__, *_subclasses(one))}


def _answer(spec: KVCacheSpec) -> str:
    """Return kvpipe's decision on an engine that has full attention beside `spec`."""
    full = interface.FullAttentionSpec(**PLAIN)
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["other"], spec)]
    try:
        make_geometry(KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups), load_settings())
    except UnsupportedError:
        return kinds.REFUSED
    return kinds.STORED


def test_every_kind_has_an_answer() -> None:
    """The list has the kinds of caches in the installed vLLM's sources, and also the kinds in this process.

    `kinds.STATES` has exactly the kinds of states that vLLM's sources define.
    """
    assert kinds.specifications(PACKAGE) == set(kinds.KINDS)
    defined = {name for name in _subclasses(KVCacheSpec) if hasattr(interface, name)}
    assert defined <= set(kinds.KINDS)
    assert kinds.states(PACKAGE) == set(kinds.STATES)


def test_a_new_kind_is_found(tmp_path: Path) -> None:
    """A subclass of a class of caches is found even if it is in another file."""
    (tmp_path / "a.py").write_text("class New(AttentionSpec):\n    pass\nclass AttentionSpec(KVCacheSpec):\n    pass\n")
    (tmp_path / "b.py").write_text("class Newer(New):\n    pass  # (Spec)\nclass Other(Thing):\n    pass\n")
    assert kinds.specifications(tmp_path) == {"AttentionSpec", "New", "Newer"}


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + 60)
def test_the_kinds_of_other_supported_releases() -> None:
    """The sources of each other recorded release have exactly the same kinds."""
    for version, sources in other_releases():
        assert kinds.specifications(sources / "vllm") == set(kinds.KINDS), version
        assert kinds.states(sources / "vllm") == set(kinds.STATES), version


@pytest.mark.parametrize("name", [n for n, one in kinds.KINDS.items() if one.answer in (kinds.STORED, kinds.REFUSED)])
def test_engine_stores_or_refuses_a_kind_as_the_page_says(name: str) -> None:
    """A kind is stored if the page says so, and refused if the page says so."""
    kind, stated = getattr(interface, name), kinds.KINDS[name].answer
    sizes = {"page_size": 64} | ({"blocks_per_request": 1} if name == "HiSparseHotSpec" else {})
    asked = {"block_size": 32, **sizes} if name.startswith("HiSparse") else PLAIN | MORE.get(name, {})
    assert _answer(kind(**asked)) == stated


@pytest.mark.parametrize("name", sorted(kinds.STATES))
def test_the_answer_of_a_state(name: str) -> None:
    """A kind of recurrent state is stored or refused as the page says."""
    known = MambaAttentionBackendEnum[name] if name != "CUSTOM" else MambaAttentionBackendEnum.CUSTOM
    shapes, dtypes = ((32,), (32,)), (torch.float32, torch.float32)
    spec = MambaSpec(block_size=32, shapes=shapes, dtypes=dtypes, mamba_type=known, mamba_cache_mode="align")
    assert _answer(spec) == kinds.STATES[name].answer


def test_the_page_is_fresh() -> None:
    """`python -m tests.contract.kinds` regenerates the page."""
    text = kinds.DOCS.read_text(encoding="utf-8")
    assert kinds.fill(text) == text
