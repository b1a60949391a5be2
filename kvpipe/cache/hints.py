"""Clients' hints on a prompt's future. A hint is soft: it changes what is evicted first, never what is right."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What a hint asks for."""

    RETAIN = "retain"
    """They are wanted until `Hint.at_s`."""
    DEMOTE = "demote"
    """They are of no more use: first to go. `Hint.at_s` is not used."""
    RESUME = "resume"
    """A prompt that begins with them comes at `Hint.at_s`."""


@dataclass(frozen=True, slots=True)
class Hint:
    """It holds for the wait that a chunk is in, or that begins when the request that uses it is over."""

    action: Action
    at_s: float = 0.0
    """In seconds of the catalog's clock, which is `time.monotonic` in an engine."""
