"""The alert rules in `deploy/prometheus/`.

Prometheus' own program accepts the rules, and each rule fires when it should.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.rigs import promtool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "kvpipe.rules.yml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def test_each_rule_is_silent_first_and_then_fires_alone() -> None:
    """For each rule, promtool runs one test.

    In this test, the rule is silent at first, and later no other rule fires.
    """
    files = sorted(one.name for one in FOLDER.glob("*.test.yml"))
    tested = [test for file in files for test in yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))["tests"]]
    assert sorted(test["name"] for test in tested) == sorted(rule["alert"] for rule in _rules())
    for test in tested:
        silent, loud = test["promql_expr_test"]
        assert silent["exp_samples"] == []
        assert f'"{test["name"]}"' in loud["exp_samples"][0]["labels"]
    promtool.run("check", "rules", "kvpipe.rules.yml", folder=FOLDER)
    assert promtool.run("test", "rules", *files, folder=FOLDER).count("SUCCESS") == len(files)


def test_each_alert_names_a_page() -> None:
    """The page and its section exist. The alert's summary names the engine or the tier for which the alert fires."""
    for rule in _rules():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        page, _, anchor = rule["annotations"]["docs"].partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, rule["alert"]
        assert "{{ $labels." in rule["annotations"]["summary"]
