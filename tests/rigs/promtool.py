"""Runs Prometheus' program `promtool`, which tests rules, and answers queries about scrapes of `/metrics`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
VARIABLES = {"__rate_interval": "5m", "__range": "5m", "model": ".*", "instance": ".*", "pod": ".*"}
"""The values that a dashboard's variables have when all options are chosen."""


def run(*words: str, folder: Path) -> str:
    """Run `promtool`, which must succeed, and return its output."""
    program = shutil.which("promtool")
    assert program, "promtool is missing: tools/setup.sh programs installs it"
    done = subprocess.run((program, *words), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main_queries() -> list[str]:
    """Return the queries of the dashboard's panels, except those in closed rows."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def check_answers(queries: Iterable[str], scrapes: Sequence[str], folder: Path) -> None:
    """Check that each query has a number (not NaN) as its answer after the `scrapes`. Scrapes are a minute apart."""
    series: dict[str, list[str]] = {}
    for at, scrape in enumerate(scrapes):
        for family in text_string_to_metric_families(scrape):
            for sample in family.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                values = series.setdefault(f"{sample.name}{{{labels}}}", [])
                values += ["_"] * (at - len(values)) + [str(sample.value)]
    named = set(re.findall(r"vllm:\w+", " ".join(queries)))
    used = [{"series": one, "values": " ".join(some)} for one, some in series.items() if one.partition("{")[0] in named]
    one_answer = {"eval_time": f"{len(scrapes) - 1}m", "exp_samples": [{"labels": "{}", "value": 1}]}
    tests = [{"expr": f"count(({_expanded(query)}) >= 0) > bool 0", **one_answer} for query in queries]
    given = {"tests": [{"interval": "1m", "input_series": used, "promql_expr_test": tests}]}
    (folder / "answers.yml").write_text(json.dumps(given), encoding="utf-8")  # every JSON document is YAML
    run("test", "rules", "answers.yml", folder=folder)


def _expanded(query: str) -> str:
    """Return `query` with the values of its variables."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], query)
