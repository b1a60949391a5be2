"""Tests of the page of served models.

It has vLLM's places that exclude prefix caches, and the answer to each architecture.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.trial.processors import PROCESSORS, processor
from tests.contract import places, registry
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases
from tests.rigs.forked import run_forked

WALK_SECONDS_MAX = 1500
ASKED = (
    "BailingMoeV3VLForConditionalGeneration", "DeepseekV2ForCausalLM", "FalconH1ForCausalLM", "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration", "Qwen3NextForCausalLM",
)  # fmt: skip
"""The architectures that are asked for on every processor."""


def test_the_installed_release_has_exactly_the_known_places() -> None:
    """The installed vLLM has exactly the known places, each once."""
    import vllm

    assert places.scan(Path(vllm.__file__).parent) == dict.fromkeys(places.PLACES, 1)


def test_a_new_place_is_found(tmp_path: Path) -> None:
    """A model that switches the prefix cache off, a layer that looks ahead, and a cache without prefixes are places."""
    (tmp_path / "m.py").write_text(
        "class New:\n"
        "    def hook(self, config):\n        config.cache_config.enable_prefix_caching = False\n"
        "    def other(self, config):\n        config.cache_config.enable_prefix_caching = True\n"
        "    def get_kv_cache_spec(self, spec):\n        return replace(spec, non_causal=True)\n"
        "    @property\n    def prefix_cacheable(self):\n        return False\n"
    )
    assert set(places.scan(tmp_path)) == {"m.py:New.hook", "m.py:New.get_kv_cache_spec", "m.py:New.prefix_cacheable"}


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + 60)
def test_the_places_of_other_supported_releases() -> None:
    """The sources of each other recorded release have exactly the same places."""
    for version, sources in other_releases():
        assert places.scan(sources / "vllm") == dict.fromkeys(places.PLACES, 1), version


def _answer(rows_file: str, page_file: str) -> None:
    """Write the rows of `ASKED` for each processor into `rows_file`, and the page into `page_file`."""
    rows = []
    for kind in PROCESSORS:
        with processor(kind):
            rows.append(list(registry.walk(ASKED)))
    Path(rows_file).write_text(json.dumps(rows), encoding="utf-8")
    page = registry.fill(registry.DOCS.read_text(encoding="utf-8"), list(registry.walk()))
    Path(page_file).write_text(page, encoding="utf-8")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the answers of one process, which has none of kvpipe's or vLLM's variables."""
    folder = tmp_path_factory.mktemp("answered")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("KVPIPE_", "VLLM_"))]:
            patch.delenv(name)
        code = run_forked(folder / "log", WALK_SECONDS_MAX, _answer, str(folder / "rows"), str(folder / "page"))
    assert code == 0, (folder / "log").read_text("utf-8", "replace")[-4000:]
    return folder


@pytest.mark.timeout(WALK_SECONDS_MAX + 30)
def test_answers_are_the_same_on_every_processor(answered: Path) -> None:
    """Models with latent attention, sparse attention and states get equal answers.

    With AMX, vLLM refuses some of these models at other places.
    """
    rows = json.loads((answered / "rows").read_text(encoding="utf-8"))
    assert len(rows) == len(PROCESSORS)
    assert all(row == rows[0] for row in rows), rows
    assert [architecture for architecture, *_ in rows[0]] == list(ASKED)


@pytest.mark.timeout(WALK_SECONDS_MAX + 30)
def test_the_page_is_fresh(answered: Path) -> None:
    """Each architecture of vLLM's registry gets the answer on the page, on every machine."""
    text = registry.DOCS.read_text(encoding="utf-8")
    assert (answered / "page").read_text(encoding="utf-8") == text, "python -m tests.contract.registry"
    asked = text[text.index("<!-- architectures:begin") :]
    assert all(f"`{name}`" in asked for name in registry.served())
    assert all(f"| {answer} |" in asked for answer in (registry.WORKS, registry.UNASKED))
