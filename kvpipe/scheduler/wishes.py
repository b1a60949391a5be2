"""Hints as they come with a request (`RawHints`), and as the scheduler side keeps them. `hints.py` parses hints."""

from __future__ import annotations

from typing import NamedTuple

from kvpipe.cache.policy.hints import Action


class Wish(NamedTuple):
    """A hint as a request states it. The hint's time is `in_s` seconds after the request's end."""

    action: Action
    in_s: float


class RawAction(NamedTuple):
    """An action whose fields have not been checked. Each field may have any value."""

    kind: object
    version: object
    payload: object


class RawHints(NamedTuple):
    """The hints of a request, not parsed yet.

    `actions` are the actions of an envelope. `own` has payloads by kind. A field that the request lacks is None.
    """

    actions: object
    own: object
