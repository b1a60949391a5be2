"""Clients' hints on a prompt's future. A hint changes which chunks are evicted first, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What a hint asks for."""

    RETAIN = "retain"
    """The chunks are wanted until `Hint.at_s`."""
    DEMOTE = "demote"
    """The chunks are of no more use and go first. `Hint.at_s` is not used."""
    RESUME = "resume"
    """A prompt that begins with the chunks comes at `Hint.at_s`."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint on a chunk, valid until its next use; if a request uses it now, from that request's end on."""

    action: Action
    at_s: float = 0.0
    """In seconds of the catalog's clock, which is `time.monotonic` in an engine."""
