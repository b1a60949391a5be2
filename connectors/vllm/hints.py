"""Hints in vLLM's requests: an envelope (`kv_hints`), or kvpipe's own key of `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvpipe.features.hints import ACTIONS_MAX
from kvpipe.scheduler.wishes import RawAction, RawHints

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMETER: Final = "kvpipe"
"""The key of `kv_transfer_params` whose value maps kinds of actions to their payloads."""
REMOTE_PREFILL: Final = "do_remote_prefill"
"""The key of `kv_transfer_params` by which a proxy asks another connector (NIXL) to bring the prompt's KV."""


def hints_of(request: Request) -> RawHints | None:
    """Return a request's hints, which are not checked yet, or None if the request has no hints."""
    envelope: object = request.kv_hints
    parameters: object = request.kv_transfer_params
    own: object = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    if envelope is None and own is None:
        return None
    return RawHints(_actions(envelope) if envelope is not None else None, own)


def is_prefilled_elsewhere(request: Request) -> bool:
    """Return whether another connector is asked to load the whole prompt.

    That connector clears the key after its attempt.
    """
    parameters: object = request.kv_transfer_params
    return isinstance(parameters, Mapping) and bool(parameters.get(REMOTE_PREFILL))


def _actions(envelope: object) -> object:
    """Return an envelope's actions, which are not checked yet."""
    actions = getattr(envelope, "actions", ...)
    if not isinstance(actions, list | tuple) or len(actions) > ACTIONS_MAX:
        return actions
    return [_action(one) for one in actions]


def _action(one: object) -> object:
    try:
        return RawAction(one.action_type, one.action_version, one.payload)  # type: ignore[attr-defined]
    except AttributeError:
        return None
