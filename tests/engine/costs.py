"""Measures how many bytes engines of the tests' models store per token and boundary: `python -m tests.engine.costs`.

The program writes `docs/results/kinds.json`. From this file `python -m tests.contract.kinds` makes a table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvpipe.protocol.geometry import Geometry

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results" / "kinds.json"
ATTENTION: Final = ("llama", "mistral-sw", "gemma2-hybrid", "gemma3n", "llama4", "deepseek-mla")
STATES: Final = ("granite-hybrid", "falcon-h1", "lfm2", "qwen3-next", "jamba")
BFLOAT16: Final = ("deepseek-mla", "qwen3-next")


def cost(geometry: Geometry) -> dict[str, object]:
    """Return the bytes that an engine with this geometry stores, per token and per boundary."""
    groups, token, boundary = len(geometry.groups), geometry.token_bytes, geometry.boundary_bytes
    return {"unit": geometry.unit_tokens, "groups": groups, "token": token, "boundary": boundary}


def measure() -> dict[str, object]:
    """Start an engine of every family and return its geometry's costs."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    from tests.engine.common import engine

    costs: dict[str, object] = {}
    for recipe in (*ATTENTION, *STATES):
        options: dict[str, Any] = {"enable_prefix_caching": recipe in STATES}
        if recipe in BFLOAT16:
            options["dtype"] = "bfloat16"
        chunk = {"chunk_tokens": 192 if recipe == "qwen3-next" else 128}
        with (
            # `test_states.py` explains this patch
            mock.patch.object(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec),
            engine(recipe, chunk, **options) as live,
        ):
            costs[recipe] = cost(live.connector.geometry)
    command = [sys.executable, "-m", "tests.engine.interpreted", "deepseek-v4", "--cost"]
    costs["deepseek-v4"] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    return costs


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
