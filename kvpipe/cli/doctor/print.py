"""Prints the findings of `kvpipe doctor`, and a verdict."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Final

from rich.console import Console
from rich.text import Text

from kvpipe.cli.doctor.checks import examine_extra
from kvpipe.cli.doctor.findings import Finding, one_line

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(extra: str, *, as_json: bool, ranks: int = 1) -> int:
    """Print the findings and a verdict. Return 1 if a check failed, else 0.

    Args:
        extra: kv_connector_extra_config, or the whole --kv-transfer-config, as JSON.
        as_json: print one JSON object instead of lines.
        ranks: the number of engine ranks on this host, each with its own pool.

    """
    with _quiet(), redirect_stdout(sys.stderr):  # vLLM logs to stdout, where the findings are printed
        findings = examine_extra(extra, ranks=ranks)
    status = max((f.status for f in findings), key=("ok", "warn", "fail").index)
    if as_json:
        result = {"status": status, "verdict": summary(findings), "findings": [f._asdict() for f in findings]}
        print(json.dumps(result, indent=2))  # noqa: T201
    else:
        _show(findings)
    return int(status == "fail")


def summary(findings: Sequence[Finding]) -> str:
    """Return a summary of the findings in one sentence."""
    failed, warned = (sum(f.status == status for f in findings) for status in ("fail", "warn"))
    warnings = f"{warned} {'warning' if warned == 1 else 'warnings'}"
    if failed:
        tail = f" and there {'is' if warned == 1 else 'are'} {warnings}" if warned else ""
        return f"kvpipe will not work here as it is: {failed} of {len(findings)} checks failed{tail}."
    if warned:
        return f"kvpipe works here, with {warnings}."
    return "kvpipe works here."


def _show(findings: Sequence[Finding]) -> None:
    """Print each finding on a line, and its solution below. Lines are not wrapped, so that programs can read them."""
    console = Console(highlight=False)
    width = max(len(f.name) for f in findings)
    for f in findings:
        line = Text.assemble((f"{f.status:<4}", _STYLES[f.status]), f"  {f.name:<{width}}  {one_line(f.detail)}")
        console.print(line, soft_wrap=True)
        if f.status != "ok":
            console.print(Text(f"{'':<6}{'':<{width}}  -> {one_line(f.remedy)}"), soft_wrap=True)
    console.print(Text(summary(findings), style="bold"), soft_wrap=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Make vLLM log only errors, unless the variable VLLM_LOGGING_LEVEL is set."""
    key = "VLLM_LOGGING_LEVEL"
    if key in os.environ:
        yield
        return
    os.environ[key] = "ERROR"
    try:
        yield
    finally:
        del os.environ[key]
