"""Prompts that do not arrive as one list of tokens: sessions with later input, and embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from tests.engine.common import BLOCK, assert_clean, baseline, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

ANSWER = 20
INPUTS = [prompt(200, 91), prompt(70, 92), prompt(130, 93)]
EMBEDDED, EMBEDDED_TOKENS = 2, 10 * BLOCK


def _answer(live: Engine, session: str) -> list[int]:
    """Give a session its inputs, one after the other. Return all its tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, detokenize=False)
    hasher = live.core.request_block_hasher
    for tokens in INPUTS:
        live.core.add_request(Request(session, list(tokens), params, None, block_hasher=hasher, resumable=True))
        while live.scheduler.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            live.core.step()
    message = list(live.scheduler.requests[session].all_token_ids)
    live.core.add_request(Request(session, [0], params, None))  # no more input
    assert session not in live.scheduler.requests
    return message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_session_with_more_input_later(*, asynchronous: bool) -> None:
    """The session's answer equals that of an engine without kvpipe.

    A later request with the same tokens finds all of these tokens.
    """
    options: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": asynchronous}
    with engine(kvpipe=None, **options) as plain:
        message = _answer(plain, "session")
    # The session drops the last token of each answer except the last answer.
    assert len(message) == sum(map(len, INPUTS)) + 3 * ANSWER - 2
    expected = baseline([message], ANSWER, **options)
    with engine(kvpipe={}, **options) as live:
        assert _answer(live, "session") == message
        saved = assert_clean(live)["units_saved"]
        assert saved >= (len(message) - 1) // BLOCK - asynchronous
        assert _answer(live, "again") == message
        again = assert_clean(live)["tokens_loaded"]
        assert again == whole_blocks(live, len(INPUTS[0]))  # vLLM makes a lookup for the first input only
        assert live.generate([message], ANSWER) == expected
        assert assert_clean(live)["tokens_loaded"] - again == saved * BLOCK


def test_equal_embeddings_hit_and_other_embeddings_do_not() -> None:
    """Equal embeddings hit. Other embeddings with equal length and token ids do not hit."""
    options: dict[str, Any] = {"enable_prompt_embeds": True, "enable_prefix_caching": False}
    with engine(kvpipe=None, **options) as plain:
        expected = [_answered(plain, one) for one in range(EMBEDDED)]
    assert expected[0] != expected[1]
    with engine(kvpipe={}, **options) as live:
        for rounds in range(2):
            for one in range(EMBEDDED):
                assert _answered(live, one) == expected[one]
                live.settle()
            assert assert_clean(live).get("tokens_loaded", 0) == rounds * EMBEDDED * (EMBEDDED_TOKENS - 1)


def _answered(live: Engine, seed: int) -> list[int]:
    """Return the answer to embeddings that are drawn with `seed`."""
    from vllm import SamplingParams

    rows = live.core.vllm_config.model_config.get_hidden_size()
    embeddings = torch.randn(EMBEDDED_TOKENS, rows, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, detokenize=False)
    name = f"e{live.scheduler.current_step}"
    live.llm.llm_engine.add_request(name, {"prompt_embeds": embeddings}, params)
    return list(live.drain()[name].outputs[0].token_ids)
