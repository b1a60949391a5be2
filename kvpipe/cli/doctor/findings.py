"""The results of the checks of `kvpipe doctor`, and functions that format numbers and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from pydantic import ByteSize

from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.config.settings import Settings

Status = Literal["ok", "warn", "fail"]

_DETAIL_CHARS_MAX: Final = 400


class Finding(NamedTuple):
    """The result of one check. `remedy` is the solution of the problem, and is empty if `status` is ok."""

    name: str
    status: Status
    detail: str
    remedy: str


class PendingFinding(NamedTuple):
    """A finding without the name of its check."""

    status: Status
    detail: str
    remedy: str = ""


class Check(NamedTuple):
    """One check. `ask` returns None if the check does not apply. `if_raised` is the status if `ask` raises."""

    name: str
    ask: Callable[[Settings, HostFacts], PendingFinding | None]
    if_raised: Status


def one_line(text: object) -> str:
    """Return `str(text)` in one line of at most 400 characters."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= _DETAIL_CHARS_MAX else flat[: _DETAIL_CHARS_MAX - 3] + "..."


def size_of(size: int) -> str:
    """Return a number of bytes with a unit, such as `1.5GiB`."""
    return ByteSize(size).human_readable()


def dotted(version: tuple[int, ...]) -> str:
    """Return a version's numbers, joined with dots."""
    return ".".join(map(str, version))
