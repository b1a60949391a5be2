"""Clients' hints on a prompt's future. A hint changes which chunks are evicted first, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """The action that a hint requests."""

    RETAIN = "retain"
    """The chunks are wanted until `Hint.at_s`."""
    DEMOTE = "demote"
    """The chunks are not needed any more and are evicted first. `Hint.at_s` is not used."""
    RESUME = "resume"
    """A prompt that begins with the chunks will come at `Hint.at_s`."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint on a chunk, valid until the chunk's next use.

    If a request is using the chunk, the hint becomes valid when this request ends.
    """

    action: Action
    at_s: float = 0.0
    """A time in seconds of the catalog's clock, which is `time.monotonic` in an engine."""
