"""Hints in vLLM's requests: an envelope (`kv_hints`), or a parameter of kvpipe's own in `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Final

from kvpipe.cache.tenants import kept_salt
from kvpipe.scheduler.hints import ACTIONS_MAX, RawAction, RawHints

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMETER: Final = "kvpipe"
"""The key of `kv_transfer_params` with payloads, by kind of action."""
CLASS: Final = "class"
"""The key beside them: the client's name for requests whose answers are continued alike (`learn_answers`)."""
CLASS_CHARS_MAX: Final = 64
REMOTE_PREFILL: Final = "do_remote_prefill"
"""The key of `kv_transfer_params` by which a proxy asks another connector (NIXL) to bring the prompt's KV."""
TAIL_TOKENS: Final = 2
"""Tokens at a prompt's end with which its chat template begins an answer, or leaves out reasoning."""


def hints_of(request: Request) -> RawHints | None:
    """Return a request's hints, unchecked, or None."""
    envelope: object = request.kv_hints
    parameters: object = request.kv_transfer_params
    own: object = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    if isinstance(own, Mapping) and CLASS in own and len(own) <= ACTIONS_MAX:
        own = {key: payload for key, payload in own.items() if key != CLASS} or None
    if envelope is None and own is None:
        return None
    return RawHints(_actions(envelope) if envelope is not None else None, own)


def is_prefilled_elsewhere(request: Request) -> bool:
    """Return whether another connector is to bring the whole prompt. It clears the sign when it has tried."""
    parameters: object = request.kv_transfer_params
    return isinstance(parameters, Mapping) and bool(parameters.get(REMOTE_PREFILL))


def kind_of(request: Request) -> Hashable:
    """Return the request's kind, for which it is learned whether answers are used again.

    It is made of the salt, and of the class that the client has named; without one, of the adapter and the last tokens
    of the prompt, with which the chat template ends.
    """
    parameters: object = request.kv_transfer_params
    own: object = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    named: object = own.get(CLASS) if isinstance(own, Mapping) else None
    salt = kept_salt(request.cache_salt or "")
    if isinstance(named, str) and len(named) <= CLASS_CHARS_MAX:
        return salt, named
    lora, prompt = request.lora_request, request.num_prompt_tokens
    tail = request.all_token_ids[max(0, prompt - TAIL_TOKENS) : prompt]
    return salt, lora.lora_path if lora is not None else "", *tail


def _actions(envelope: object) -> object:
    """Return an envelope's actions, unchecked."""
    actions = getattr(envelope, "actions", ...)
    if not isinstance(actions, list | tuple) or len(actions) > ACTIONS_MAX:
        return actions
    return [_action(one) for one in actions]


def _action(one: object) -> object:
    try:
        return RawAction(one.action_type, one.action_version, one.payload)  # type: ignore[attr-defined]
    except AttributeError:
        return None
