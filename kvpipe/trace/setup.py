"""Tracing as the settings say: what is recorded, and where it goes."""

from __future__ import annotations

import logging
import os

from kvpipe import __version__
from kvpipe.config import Settings
from kvpipe.errors import ConfigError
from kvpipe.loop import spare_cpus
from kvpipe.trace.events import SCHEDULER, Started
from kvpipe.trace.recorder import FileSink, LogSink, Recorder, Sink, Writer


def tracing(settings: Settings, engine: str, side: str, rank: int, layers: int) -> tuple[Recorder, Writer]:
    """Return the recorder of one side of one process, and the thread that writes what it hears."""
    level = getattr(logging, settings.log_level.upper())
    to_file, debug = settings.trace_file is not None, level <= logging.DEBUG
    detail = debug or (to_file and settings.trace_level == "debug")
    recorder = Recorder(
        rank,
        lifecycle=to_file or settings.otel or level <= logging.INFO,
        transitions=to_file or debug,
        detail=detail,
        sample=settings.trace_sample,
    )
    sinks: list[Sink] = [LogSink(level)]
    if settings.trace_file is not None:
        if not settings.trace_file.absolute().parent.is_dir():
            msg = (
                f"kvpipe: trace_file={str(settings.trace_file)!r}: its folder does not exist; make it, or name another"
            )
            raise ConfigError(msg)
        started = Started(
            0, rank, "", 0, 0, kvpipe=__version__, side=side, pid=os.getpid(), layers=layers,
            sample=settings.trace_sample, detail=detail,
        )  # fmt: skip
        sinks.append(FileSink(settings.trace_file, settings.trace_bytes_max, started))
    if settings.otel and rank == SCHEDULER:  # requests are the scheduler's
        from kvpipe.trace.otel import OtelSink  # noqa: PLC0415  (an extra)

        sinks.append(OtelSink(engine))
    return recorder, Writer(recorder, sinks, engine, spare_cpus())
