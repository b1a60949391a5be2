"""This module makes the recorder of a trace, and the sinks that write the events, from the settings."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from kvpipe import __version__
from kvpipe.config.settings import Settings
from kvpipe.errors import ConfigError
from kvpipe.inputs import files
from kvpipe.machine.cores import spare_cpus
from kvpipe.trace.events import SCHEDULER, Started
from kvpipe.trace.log import warn
from kvpipe.trace.recorder import FileSink, LogSink, Recorder, Sink, Writer


def validate_trace_file(path: Path) -> None:
    """Refuse a path to which no trace can be written. The file may be missing. A pipe or character device is accepted.

    Raises:
        ConfigError: the path's folder does not exist, or the path is a folder, a link, a socket or a disk.

    """
    why = "its folder does not exist; create the folder, or name another file"
    if path.absolute().parent.is_dir():
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            why = f"it cannot be inspected ({files.why(error)}); name another file"
        else:
            if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                return
            why = f"it is {files.file_type(mode)}; name a regular file, which kvpipe creates"
            if stat.S_ISLNK(mode):  # another user may have made the link
                why = "it is a symbolic link, which kvpipe does not follow; name the link's target"
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
        validate_trace_file(settings.trace_file)
        if doubt := files.doubts(settings.trace_file):
            warn(
                "trace_file_shared", path=str(settings.trace_file), why=doubt, remedy="delete the file, or name another"
            )
        started = Started(
            0, rank, "", 0, 0, kvpipe=__version__, side=side, pid=os.getpid(), layers=layers,
            sample=settings.trace_sample, detail=detail,
        )  # fmt: skip
        sinks.append(FileSink(settings.trace_file, settings.trace_bytes_max, started))
    # not on ranks, because only the scheduler's side has the events of requests
    if settings.otel and rank == SCHEDULER:
        from kvpipe.trace.otel import OtelSink  # noqa: PLC0415  (an extra)

        sinks.append(OtelSink(engine))
    return recorder, Writer(recorder, sinks, engine, spare_cpus())
