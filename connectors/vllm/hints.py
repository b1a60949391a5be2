"""Hints as vLLM carries them: an envelope with the request, or a parameter of its own for clients that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvpipe.scheduler.hints import ACTIONS_MAX, RawAction, RawHints

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMETER: Final = "kvpipe"
"""The key of `kv_transfer_params` that has payloads, by kind of action."""


def hints_of(request: Request) -> RawHints | None:
    """Return what came with a request, or None. In vLLM's own process nothing has checked any of it."""
    envelope: object = request.kv_hints
    parameters: object = request.kv_transfer_params
    own: object = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    if envelope is None and own is None:
        return None
    return RawHints(_actions(envelope) if envelope is not None else None, own)


def _actions(envelope: object) -> object:
    """Return an envelope's actions, or what is none."""
    actions = getattr(envelope, "actions", ...)
    if not isinstance(actions, list | tuple) or len(actions) > ACTIONS_MAX:
        return actions
    return [_action(one) for one in actions]


def _action(one: object) -> object:
    try:
        return RawAction(one.action_type, one.action_version, one.payload)  # type: ignore[attr-defined]
    except AttributeError:
        return None
