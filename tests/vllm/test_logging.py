"""The ways to configure vLLM's log also apply to kvpipe's lines."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.logger
from vllm.config.logging import LoggingConfig

from kvpipe.trace import log

VLLM = logging.getLogger("vllm")


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore vLLM's and kvpipe's loggers after the test."""
    monkeypatch.setattr(VLLM, "handlers", VLLM.handlers[:])
    monkeypatch.setattr(VLLM, "propagate", VLLM.propagate)
    monkeypatch.setattr(vllm.logger, "_vllm_process_info", ("EngineCore", os.getpid()))
    monkeypatch.setattr(log.log, "threshold", logging.NOTSET)
    before = VLLM.level, log.log.level
    yield
    VLLM.setLevel(before[0])
    log.log.setLevel(before[1])


def lines(capsys: pytest.CaptureFixture[str], **config: Any) -> list[str]:
    """Configure vLLM's log, write two lines, and return the output. All output must be on vLLM's stream."""
    vllm.logger.configure_logging(LoggingConfig(configure_logging=True, **{"pylogging_config_file": None} | config))
    capsys.readouterr()
    log.configure("info")
    log.info("pool_ready", slots=3)
    log.warn("odd", why="no space")
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_lines_have_vllms_prefix_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The prefix has the process's name and id, the level, the time, and the place in the source."""
    prefix = rf"\(EngineCore pid={os.getpid()}\) %s \S+ \S+ \[test_logging\.py:\d+\] "
    ready, odd = lines(capsys, log_level="INFO")
    assert re.fullmatch(prefix % "INFO" + "pool_ready slots=3", ready), ready
    assert re.fullmatch(prefix % "WARNING" + "odd why='no space'", odd), odd


def test_level_of_vllm_drops_lines_of_kvpipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The variable VLLM_LOGGING_LEVEL sets this level."""
    (odd,) = lines(capsys, log_level="WARNING")
    assert odd.endswith("odd why='no space'")


def test_json_lines_of_vllm_have_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """`--logging-config.formatter json` writes lines for a log collector."""
    ready, _ = map(json.loads, lines(capsys, log_level="INFO", formatter="json"))
    assert (ready["levelname"], ready["process"]) == ("INFO", os.getpid())
    assert ready["kvpipe"] == {"event": "pool_ready", "slots": 3}


def test_logging_file_of_the_host_receives_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """VLLM_LOGGING_CONFIG_PATH names the file. The file may set a level for kvpipe's logger only."""
    file = tmp_path / "logging.json"
    config: dict[str, Any] = {
        "version": 1,
        "formatters": {
            "host": {"format": "host %(vllm_process_name)s %(process)d %(levelname)s %(name)s: %(message)s"}
        },
        "handlers": {"host": {"class": "logging.StreamHandler", "formatter": "host", "stream": "ext://sys.stdout"}},
        "loggers": {"vllm": {"handlers": ["host"], "level": "INFO", "propagate": False}},
    }
    file.write_text(json.dumps(config))
    start = f"host EngineCore {os.getpid()}"
    ready, odd = f"{start} INFO vllm.kvpipe: pool_ready slots=3", f"{start} WARNING vllm.kvpipe: odd why='no space'"
    assert lines(capsys, pylogging_config_file=str(file)) == [ready, odd]
    config["loggers"]["vllm.kvpipe"] = {"level": "WARNING"}
    file.write_text(json.dumps(config))
    assert lines(capsys, pylogging_config_file=str(file)) == [odd]
