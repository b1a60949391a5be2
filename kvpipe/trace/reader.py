"""Reads traces, even if they are cut off, mixed with other lines, or of other versions.

Unreadable lines are skipped.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvpipe.errors import UsageError
from kvpipe.inputs.files import file_type
from kvpipe.trace.events import FORMAT, Event, Started
from kvpipe.trace.log import printable
from kvpipe.trace.transitions import EVENTS

LINE_BYTES_MAX = 1 << 20
"""The most bytes of a line. A longer line counts as several unreadable lines."""
ENDLESS_BYTES_MAX = 64 << 20
"""A file with a line of at least this number of bytes is not a trace."""
LAYERS_MAX = 4096
"""The most layers of a rank that the reader accepts. The number is limited, because a replay has a state per layer."""
_NS_MAX = 1 << 63
"""The reader accepts only times below this number of nanoseconds, which is 292 years."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_READ_BYTES = 1 << 20

CUT = "cut off"
FOREIGN = "not a line of a trace"
NEWER = "of a newer kvpipe"
MALFORMED = "damaged"


class _Tag(msgspec.Struct):
    """The fields by which a line is recognised as an event."""

    event: str
    t_ns: int


class Trace:
    """The events of a file, in the file's order. `unread` counts the lines that are not events, by reason."""

    def __init__(self, path: Path, wanted: Callable[[bytes], bool] | None = None) -> None:
        """`wanted` filters undecoded lines. None means that all lines are wanted.

        Raises:
            UsageError: the file cannot be read.

        """
        self.path, self._wanted = path, wanted
        self.unread: Counter[str] = Counter()
        self.lines = 0
        self._decoder = decoder()
        self._tag = msgspec.json.Decoder(_Tag)
        try:
            kind = file_type(path.stat().st_mode)  # checked before `open`, which would wait for a pipe's writer
            why = kind and f"it is {kind}"
            if not why:
                path.open("rb").close()
        except OSError as error:
            why = error.strerror or repr(error)
        if why:
            raise self._refusal(f"cannot be read ({why})")

    def __iter__(self) -> Iterator[Event]:
        """Yield the readable events.

        Raises UsageError at a line of `ENDLESS_BYTES_MAX` bytes, because no trace has such a line.
        """
        decode, wanted, parts = self._decoder.decode, self._wanted, 0
        with self.path.open("rb", buffering=_READ_BYTES) as file:
            while line := file.readline(LINE_BYTES_MAX):
                self.lines += 1
                parts = parts + 1 if len(line) == LINE_BYTES_MAX and line[-1:] != b"\n" else 0
                if parts * LINE_BYTES_MAX >= ENDLESS_BYTES_MAX:
                    raise self._refusal(f"has a line of more than {ENDLESS_BYTES_MAX >> 20} MiB")
                if wanted is not None and not wanted(line):
                    continue
                try:
                    event: Event = decode(line)
                except _UNREADABLE as error:
                    if line.strip():
                        self.unread[self._why(line, str(error))] += 1
                    continue
                if not (0 <= event.t_ns < _NS_MAX and 0 <= event.wall_ns < _NS_MAX):
                    self.unread[MALFORMED] += 1
                    continue
                if isinstance(event, Started):
                    if not 0 <= event.layers <= LAYERS_MAX:
                        self.unread[MALFORMED] += 1
                        continue
                    if event.format > FORMAT:
                        self.unread[NEWER] += 1
                yield event

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"kvpipe: {printable(str(self.path))} {why}; give a trace_file")

    def _why(self, line: bytes, error: str) -> str:
        try:
            tag = self._tag.decode(line)
        except _UNREADABLE:
            if line.startswith(b'{"event":"') and not line.rstrip().endswith(b"}"):
                return CUT
            return MALFORMED if line.startswith(b'{"event":"') else FOREIGN
        return NEWER if tag.event not in EVENTS or "unknown field" in error else MALFORMED

    def unread_summary(self) -> str:
        """Return one sentence about the unreadable lines, or "" if every line was readable."""
        if not self.unread:
            return ""
        parts = ", ".join(f"{count} {why}" for why, count in self.unread.most_common())
        return f"{self.unread.total()} of {self.lines} lines could not be read: {parts}"


def decoder() -> msgspec.json.Decoder[Event]:
    """Return a decoder of lines with any event."""
    kind: Any = functools.reduce(operator.or_, EVENTS.values())
    return msgspec.json.Decoder(kind)


def files_of(path: Path) -> list[Path]:
    """Return the files of a trace, the older file first."""
    older = path.with_name(path.name + ".1")
    return [older, path] if older.exists() else [path]
