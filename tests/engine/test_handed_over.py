"""Prefill in one engine, decode in another engine, with a tier between them.

The decode engine gets each prompt as soon as the prefill engine has answered it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.child_engine import child
from tests.engine.common import assert_clean, baseline, engine, prompt
from tests.rigs.tier_worlds import WORLDS

pytestmark = pytest.mark.engine

TOKENS, UNIT = 12, 32
PROMPTS = [prompt(300, 501), prompt(611, 502), prompt(420, 503)]
OWN: dict[str, Any] = {"enable_prefix_caching": False}


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_decode_engine_hits_prompts_that_are_still_being_stored(tmp_path: Path, kind: str) -> None:
    """Each prompt goes to the prefill engine. After the answer, the prompt goes at once to the decode engine.

    The decode engine loads all prompts, and answers are equal.
    """
    expected = baseline(PROMPTS, TOKENS, **OWN)
    with WORLDS[kind](tmp_path) as world:
        tier = json.loads(world.spec.model_dump_json(exclude_none=True))
        config = {"chunk_tokens": 64, "tiers": [tier]}
        with (
            child(kvpipe=config, role="kv_producer", **OWN) as prefill,
            engine(kvpipe=config, role="kv_consumer", **OWN) as decode,
        ):
            side = decode.connector.scheduler
            assert side is not None
            for at, (tokens, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
                first, _ = prefill.generate([tokens], 1, at_once=True)
                assert first == [answer[:1]]
                assert decode.generate([tokens], TOKENS) == [answer]
                assert side.tracer.hit_tokens[kind] == sum(len(one) // UNIT * UNIT for one in PROMPTS[: at + 1])
            assert_clean(decode)
