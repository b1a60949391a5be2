"""Hints in vLLM's requests: an envelope, a parameter, or a value of another type instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.pooling_params import PoolingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from kvpipe.connectors.vllm.hints import hints_of
from kvpipe.features.hints import ACTIONS_MAX
from kvpipe.scheduler.wishes import RawAction, RawHints


def _request(extra: dict[str, Any] | None = None, envelope: Any = None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(extra_args=extra), None, kv_hints=envelope)


def _envelope(count: int = 1) -> KvHintsEnvelope:
    return KvHintsEnvelope("0.1", "m", [KvHintAction(f"a{i}", "kv.demote", "1.0", {}) for i in range(count)])


def test_request_without_hints_has_none() -> None:
    """A request with only other connectors' parameters, and a request for pooling, have no hints either."""
    pooled = Request("r", [1, 2, 3], None, PoolingParams())
    others = {"kv_transfer_params": {"do_remote_prefill": False}}
    assert [hints_of(one) for one in (_request(), _request({"other": 1}), _request(others), pooled)] == [None] * 4


def test_envelope_and_parameter_give_the_same_hints() -> None:
    """A request may have an envelope, a parameter, or both."""
    own = {"retain": {"ttl_seconds": 5}}
    extra = {"kv_transfer_params": {"kvpipe": own}}
    action = RawAction("kv.demote", "1.0", {})
    assert hints_of(_request(extra)) == RawHints(None, own)
    assert hints_of(_request(None, _envelope())) == RawHints([action], None)
    assert hints_of(_request(extra, _envelope())) == RawHints([action], own)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_parameters_of_an_http_request_arrive_unchanged(kind: Any) -> None:
    """Parameters in the body of an HTTP request arrive unchanged with the request."""
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
def test_value_that_is_no_envelope_is_passed_on(
    extra: dict[str, Any] | None, envelope: Any, raw: RawHints | None
) -> None:
    """In vLLM's own process no code has checked the value, and kvpipe passes the value on unchanged."""
    assert hints_of(_request(extra, envelope)) == raw


def test_an_endless_envelope_is_not_walked() -> None:
    """An envelope with too many actions is passed on before all actions are read."""
    envelope = _envelope(ACTIONS_MAX + 1)
    assert hints_of(_request(None, envelope)) == RawHints(envelope.actions, None)
