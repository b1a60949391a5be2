"""kvpipe runs beside vLLM's ExampleConnector, which keeps whole prompts in files.

The connector that vLLM asks first loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.connector import KVPipeConnector
from tests.engine.common import UNEXPECTED, baseline, engine, prompt

pytestmark = pytest.mark.engine

TOKENS = 12
FIRST = prompt(300, 421)
SECOND = [*FIRST[:200], *prompt(100, 422)]
"""A prompt that shares 200 tokens with `FIRST`.

ExampleConnector finds only whole prompts, so it does not find these 200 tokens.
"""
OWN: dict[str, Any] = {"enable_prefix_caching": False}
KVPIPE = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"chunk_tokens": 64}}


@pytest.mark.parametrize("first", [True, False], ids=["kvpipe first", "kvpipe last"])
def test_first_connector_loads_a_prompt_that_both_connectors_have(tmp_path: Path, *, first: bool) -> None:
    """Both orders of the connectors are tested. Answers equal the answers of an engine without connectors."""
    cold, branch = baseline([FIRST, SECOND], TOKENS, **OWN)
    other = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip
    children = [KVPIPE, other] if first else [other, KVPIPE]
    with engine(kvpipe={"connectors": children}, connector="MultiConnector", **OWN) as live:
        multi: Any = live.connector
        (own,) = (child for child in multi._connectors if isinstance(child, KVPipeConnector))
        found, loaded = [], []
        for tokens, answer in ((FIRST, cold), (FIRST, cold), (SECOND, branch)):
            request = live.add(tokens, TOKENS)
            output = live.drain()[request]
            assert list(output.outputs[0].token_ids) == answer
            live.settle()
            found.append(output.num_cached_tokens)
            loaded.append(own.stats().get("tokens_loaded", 0))
        assert found == [0, 288, 192]
        assert loaded == ([0, 288, 480] if first else [0, 0, 192])
        assert not {name for name in own.stats() if name in UNEXPECTED}
