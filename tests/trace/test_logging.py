"""The log consists of records of Python's `logging` below vLLM's logger.

The host application's logging does not change.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvpipe.trace import events as e
from kvpipe.trace import log
from kvpipe.trace.recorder import LogSink

VLLM = logging.getLogger("vllm")


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the loggers of vLLM and kvpipe to their unconfigured state."""
    monkeypatch.setattr(log.log, "threshold", logging.NOTSET)
    monkeypatch.setattr(VLLM, "handlers", [])
    monkeypatch.setattr(VLLM, "propagate", True)
    before = VLLM.level, log.log.level
    VLLM.setLevel(logging.INFO)
    yield
    VLLM.setLevel(before[0])
    log.log.setLevel(before[1])


def write_some() -> None:
    """Log a request's event through the writer's sink, and a fault."""
    LogSink(logging.INFO).write([e.RequestAdmitted(1, -1, "r1", 2, 3, 4, "e1")])
    log.Counters().fault("job_failed", why="no space")


def test_structlog_of_the_host_is_unchanged() -> None:
    """The host's structlog configuration applies to the host's lines, but not to kvpipe's lines."""
    before, host = structlog.get_config(), io.StringIO()
    try:
        structlog.configure(
            processors=[structlog.processors.JSONRenderer(sort_keys=True)],
            logger_factory=structlog.PrintLoggerFactory(host),
        )
        configured = structlog.get_config()
        log.configure("debug")
        write_some()
        after = structlog.get_config()
        structlog.get_logger().info("mine")
    finally:
        structlog.configure(**before)
    assert after == configured
    assert host.getvalue() == '{"event": "mine"}\n'


def test_records_have_the_fields_in_text_and_as_values(caplog: pytest.LogCaptureFixture) -> None:
    """A logger's name is below the name of vLLM's logger.

    Events of one kind have the same template, by which error trackers group events.
    """
    write_some()
    log.Counters().fault("job_failed", why="gone")
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("vllm.kvpipe", "INFO", "request_admitted engine=e1 request=r1 epoch=2 step=3"),
        ("vllm.kvpipe", "WARNING", "job_failed seen=1 why='no space'"),
        ("vllm.kvpipe", "WARNING", "job_failed seen=1 why=gone"),
    ]
    admitted, *failed = caplog.records
    assert admitted.__dict__["kvpipe"] == {
        "event": "request_admitted", "engine": "e1", "request": "r1", "epoch": 2, "step": 3,
    }  # fmt: skip
    assert {one.msg for one in failed} == {"job_failed seen=%s why=%s"}


def test_records_name_the_line_that_logs(caplog: pytest.LogCaptureFixture) -> None:
    """For each of the logger's methods, a record names the caller's line in the source."""
    log.warn("odd")
    log.log.error("odd", exc_info=ValueError("bad"))
    log.log.log(logging.INFO, "odd", slots=3)
    assert {(one.filename, one.funcName) for one in caplog.records} == {
        ("test_logging.py", "test_records_name_the_line_that_logs")
    }


def test_text_of_a_field_is_on_one_line_and_without_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks in a request's id or a tier's answer are escaped, so they begin no new line in the log."""
    log.warn("odd", why="a\nb\x1b[31m", request="r\ud800", empty="", percent="5%s")
    (record,) = caplog.records
    assert record.getMessage() == r"odd why='a\nb\x1b[31m' request='r\ud800' empty='' percent=5%s"
    assert record.__dict__["kvpipe"]["why"] == r"a\nb\x1b[31m"


@pytest.mark.parametrize(
    ("ours", "vllms", "hosts", "logged"),
    [
        ("info", "INFO", "NOTSET", ["info", "warning"]),
        ("warning", "INFO", "NOTSET", ["warning"]),
        ("debug", "WARNING", "NOTSET", ["warning"]),
        ("debug", "DEBUG", "NOTSET", ["debug", "info", "warning"]),
        ("info", "DEBUG", "WARNING", ["warning"]),
    ],
)
def test_line_is_written_only_if_it_passes_every_level(
    ours: str, vllms: str, hosts: str, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A line is written only if each of several levels permits it.

    `hosts` is the level that the host's configuration sets for kvpipe.
    """
    VLLM.setLevel(vllms)
    log.log.setLevel(logging.getLevelNamesMapping()[hosts])
    log.configure(ours)
    for level in ("debug", "info", "warning"):
        getattr(log.log, level)(level)
    assert [one.getMessage() for one in caplog.records] == logged
    assert log.log.level == logging.getLevelNamesMapping()[hosts]


def test_handler_that_fails_raises_nothing() -> None:
    """If a handler raises, the thread that logs does not notice."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.name)

    VLLM.addHandler(Broken())
    write_some()


def test_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Error trackers read the traceback from the record's `exc_info`."""
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.log.exception("odd", item=3)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "odd item=3")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
