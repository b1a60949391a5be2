"""Prompts, and checks of the engine's answers against answers without any cache."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch

from tests.second_engine.engine import Engine, Request
from tests.second_engine.model import VOCABULARY, Transformer

MODEL = Transformer()


def prompt(tokens: int, *, seed: int = 0, shared: int = 0) -> tuple[int, ...]:
    """Return a prompt of `tokens` tokens. All prompts have their first `shared` tokens in common."""
    common, own = random.Random(-1), random.Random(seed)
    return tuple((common if i < shared else own).randrange(VOCABULARY) for i in range(tokens))


@functools.cache
def _alone(words: tuple[int, ...], new_tokens: int) -> Request:
    engine = Engine(MODEL, prefix_cache=False, step_tokens=1024)
    request = engine.add("alone", words, new_tokens)
    engine.run()
    return request


def check(requests: Sequence[Request]) -> None:
    """Check that each request is done, and has the same answer as alone and without a cache.

    Logits are compared to the last bit.
    """
    for request in requests:
        expected = _alone(tuple(request.all_token_ids[: request.num_prompt_tokens]), request.new_tokens_max)
        assert request.output == expected.output, request.request_id
        assert torch.equal(torch.stack(request.logits), torch.stack(expected.logits)), request.request_id
