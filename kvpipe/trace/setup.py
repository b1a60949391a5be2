"""Sets tracing up from the settings: which events are recorded, and by which sinks."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from kvpipe import __version__, files
from kvpipe.config import Settings
from kvpipe.cores import spare_cpus
from kvpipe.errors import ConfigError
from kvpipe.trace.events import SCHEDULER, Started
from kvpipe.trace.log import warn
from kvpipe.trace.recorder import FileSink, LogSink, Recorder, Sink, Writer


def check_trace_file(path: Path) -> None:
    """Refuse what a trace is not written to. A file is made, a pipe and a character device are written to as they are.

    Raises:
        ConfigError: its folder does not exist, or it is a folder, a link, a socket or a disk.

    """
    why = "its folder does not exist; make it, or name another"
    if path.absolute().parent.is_dir():
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            why = f"it cannot be looked at ({files.why(error)}); name another"
        else:
            if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                return
            why = f"it is {files.kind_of(mode)}; name a file, which is made"
            if stat.S_ISLNK(mode):  # who made it may not be who runs the engine
                why = "it is a link, which is not followed; name the file that it leads to"
    raise ConfigError(f"kvpipe: trace_file={str(path)!r}: {why}")


def tracing(settings: Settings, engine: str, side: str, rank: int, layers: int) -> tuple[Recorder, Writer]:
    """Return the recorder of one side of one process, and the thread that writes its events."""
    level = getattr(logging, settings.log_level.upper())
    to_file, debug = settings.trace_file is not None, level <= logging.DEBUG
    requests = debug or (settings.log_requests and level <= logging.INFO)
    detail = debug or (to_file and settings.trace_level == "debug")
    recorder = Recorder(
        rank,
        lifecycle=to_file or settings.otel or requests,
        transitions=to_file or debug,
        detail=detail,
        sample=settings.trace_sample,
    )
    sinks: list[Sink] = [LogSink(level, requests=requests)]
    if settings.trace_file is not None:
        check_trace_file(settings.trace_file)
        if doubt := files.doubts(settings.trace_file):
            warn("trace_file_shared", path=str(settings.trace_file), why=doubt, remedy="delete it, or name another")
        started = Started(
            0, rank, "", 0, 0, kvpipe=__version__, side=side, pid=os.getpid(), layers=layers,
            sample=settings.trace_sample, detail=detail,
        )  # fmt: skip
        sinks.append(FileSink(settings.trace_file, settings.trace_bytes_max, started))
    if settings.otel and rank == SCHEDULER:  # requests are the scheduler's
        from kvpipe.trace.otel import OtelSink  # noqa: PLC0415  (an extra)

        sinks.append(OtelSink(engine))
    return recorder, Writer(recorder, sinks, engine, spare_cpus())
