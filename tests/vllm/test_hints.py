"""Hints as they come with vLLM's requests: an envelope, a parameter, or what should be one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from kvpipe.connectors.vllm.hints import CLASS_CHARS_MAX, hints_of, kind_of
from kvpipe.scheduler.hints import ACTIONS_MAX, RawAction, RawHints


def _request(extra: dict[str, Any] | None = None, envelope: Any = None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(extra_args=extra), None, kv_hints=envelope)


def _envelope(count: int = 1) -> KvHintsEnvelope:
    return KvHintsEnvelope("0.1", "m", [KvHintAction(f"a{i}", "kv.demote", "1.0", {}) for i in range(count)])


def test_without_hints_there_are_none() -> None:
    """Also where other connectors' parameters come with the request, or it is to be pooled."""
    pooled = Request("r", [1, 2, 3], None, PoolingParams())
    others = {"kv_transfer_params": {"do_remote_prefill": False}}
    assert [hints_of(one) for one in (_request(), _request({"other": 1}), _request(others), pooled)] == [None] * 4


def test_the_envelope_and_the_parameter() -> None:
    """Either, or both."""
    own = {"retain": {"ttl_seconds": 5}}
    extra = {"kv_transfer_params": {"kvpipe": own}}
    action = RawAction("kv.demote", "1.0", {})
    assert hints_of(_request(extra)) == RawHints(None, own)
    assert hints_of(_request(None, _envelope())) == RawHints([action], None)
    assert hints_of(_request(extra, _envelope())) == RawHints([action], own)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_the_servers_requests(kind: Any) -> None:
    """What is in the body of an HTTP request comes with the request, nested as it is."""
    own = {"retain": {"ttl_seconds": 5}, "resume": {"after_seconds": 20.5}}
    body = {"model": "m", "max_tokens": 4, "kv_transfer_params": {"kvpipe": own}}
    body |= {"prompt": "p"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "p"}]}
    params = kind.model_validate(body).to_sampling_params(4, {})
    assert hints_of(Request("r", [1, 2, 3], params, None)) == RawHints(None, own)


@pytest.mark.parametrize(
    ("extra", "envelope", "raw"),
    [
        ({"kv_transfer_params": "kvpipe"}, None, None),
        ({"kv_transfer_params": ["kvpipe"]}, None, None),
        ({"kv_transfer_params": {"kvpipe": 3}}, None, RawHints(None, 3)),
        (None, "demote", RawHints(..., None)),
        (None, {"actions": []}, RawHints(..., None)),
        (None, SimpleNamespace(actions=5), RawHints(5, None)),
        (None, SimpleNamespace(actions=[None, {}]), RawHints([None, None], None)),
    ],
    ids=repr,
)
def test_what_is_no_envelope(extra: dict[str, Any] | None, envelope: Any, raw: RawHints | None) -> None:
    """In vLLM's own process nothing checks what comes: it is handed on as what it is."""
    assert hints_of(_request(extra, envelope)) == raw


def test_an_endless_envelope_is_not_walked() -> None:
    """What is too long is handed on as it is."""
    envelope = _envelope(ACTIONS_MAX + 1)
    assert hints_of(_request(None, envelope)) == RawHints(envelope.actions, None)


def _classed(named: object, **more: Any) -> Request:
    return _request({"kv_transfer_params": {"kvpipe": {"class": named, **more}}})


def test_whose_answers_are_taken_for_alike() -> None:
    """Those of one class, or of prompts that end alike, for one adapter; and of one salt."""
    other = Request("o", [1, 2, 4], SamplingParams(), None)
    adapted = Request("a", [1, 2, 3], SamplingParams(), None, lora_request=LoRARequest("a", 1, "/a"))
    embedded = Request("e", None, SamplingParams(), None, prompt_embeds=torch.zeros(3, 4))
    salted, classed = Request("s", [1, 2, 3], SamplingParams(), None, cache_salt="s"), _classed("x")
    classed.cache_salt = "s"
    alone = (_request(), other, adapted, embedded, salted, _classed("x"), _classed("y"), classed)
    assert len({kind_of(one) for one in alone}) == len(alone)
    assert kind_of(_classed("x", retain={})) == kind_of(_classed("x"))
    answering = _request()
    answering.append_output_token_ids(7)
    assert kind_of(answering) == kind_of(Request("s", [5, 5, 2, 3], SamplingParams(), None)) == kind_of(_request())
    assert kind_of(Request("p", [1], None, PoolingParams())) == ("", "", 1)


def test_of_a_long_salt_a_digest_is_learned_from() -> None:
    """What is learned outlives requests, and an offline engine takes salts of any length."""
    long = [Request("s", [1, 2, 3], SamplingParams(), None, cache_salt="s" * 1_000_000 + end) for end in "ab"]
    kinds = [kind_of(one) for one in long]
    assert kinds[0] != kinds[1]
    assert max(len(repr(one)) for one in kinds) < 200


@pytest.mark.parametrize("named", ["x" * (CLASS_CHARS_MAX + 1), 3, None, ["x"], {"x": 1}, True])
def test_what_is_no_class(named: object) -> None:
    """It is not looked at."""
    assert kind_of(_classed(named)) == kind_of(_request())
    assert hints_of(_classed(named)) is None


def test_a_class_is_no_hint() -> None:
    """Others that come with it are read as ever."""
    assert hints_of(_classed("x")) is None
    assert hints_of(_classed("x", retain={})) == RawHints(None, {"retain": {}})
    assert hints_of(_request({"kv_transfer_params": {"kvpipe": {"class": "x"}}}, _envelope())) == RawHints(
        [RawAction("kv.demote", "1.0", {})], None
    )
