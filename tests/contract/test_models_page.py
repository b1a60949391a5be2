"""Tests of the page of served models.

It has vLLM's places that exclude prefix caches, and the answer to each architecture.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.trial.processors import PROCESSORS
from tests.contract import places, registry
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

WALK_SECONDS_MAX = 1500


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


def test_answers_are_the_same_on_every_processor() -> None:
    """Models with latent attention, sparse attention and states get equal answers.

    With AMX, vLLM refuses some of these models at other places.
    """
    asked = (
        "BailingMoeV3VLForConditionalGeneration", "DeepseekV2ForCausalLM", "FalconH1ForCausalLM", "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration", "Qwen3NextForCausalLM",
    )  # fmt: skip
    code = (
        "import json\n"
        "from kvpipe.connectors.vllm.trial.processors import PROCESSORS, processor\n"
        "from tests.contract.registry import walk\n"
        "for kind in PROCESSORS:\n"
        "    with processor(kind):\n"
        f"        print('rows:', json.dumps(list(walk({asked!r}))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=WALK_SECONDS_MAX
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("rows:")]
    assert len(rows) == len(PROCESSORS), done.stderr[-4000:]
    assert len(set(rows)) == 1, rows
    assert all(name in rows[0] for name in asked)


@pytest.mark.timeout(WALK_SECONDS_MAX + 30)
def test_the_page_is_fresh() -> None:
    """Each architecture of vLLM's registry gets the answer on the page, on every machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVPIPE_", "VLLM_"))}
    command = [sys.executable, "-m", registry.__name__, "--print"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WALK_SECONDS_MAX, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    text = registry.DOCS.read_text(encoding="utf-8")
    assert done.stdout.endswith(text), "python -m tests.contract.registry"
    asked = text[text.index("<!-- architectures:begin") :]
    assert all(f"`{name}`" in asked for name in registry.served())
    assert all(f"| {answer} |" in asked for answer in (registry.WORKS, registry.UNASKED))
