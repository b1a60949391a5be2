"""Writes the tables of `docs/` that are made from the code: `python -m tests.unit.pages`.

`python -m tests.unit.pages counters.md` writes the tables of only this page. Only the tables of `tracing.md` need vLLM.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kvpipe.config import settings as config
from kvpipe.connectors.vllm.trial import doc_tables
from kvpipe.features import hints
from kvpipe.inputs import config_errors, plugins
from kvpipe.inputs.quota_spec import QuotaSpec
from kvpipe.tiers.registry import spec_of
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace import counters
from kvpipe.trace.events import Event
from kvpipe.trace.miss_reasons import REASONS
from kvpipe.trace.transitions import EVENTS, Transition
from kvpipe.transfer.layouts import ADAPTERS, BETWEEN, INSIDE, OPAQUE, REFUSALS

DOCS: Final = Path(__file__).parents[2] / "docs"
RULES: Final = DOCS.parent / "deploy" / "prometheus" / "kvpipe.rules.yml"


def _table(*rows: str) -> str:
    """Return a table in Markdown. The first of `rows` is the head of the table."""
    return "\n".join([rows[0], "|---" * (rows[0].count("|") - 1) + "|", *rows[1:]]) + "\n"


def _of_counters() -> dict[str, str]:
    def counted(names: Mapping[Any, str]) -> str:
        return _table("| name | what is counted |", *(f"| `{name}` | {names[name]} |" for name in sorted(names)))

    return {"faults": counted(counters.FAULTS), "counts": counted(counters.COUNTS)}


def _of_hints() -> dict[str, str]:
    rows = (f"| `{why}` | {sentence} |" for why, sentence in sorted(hints.REASONS.items()))
    return {"ignored": _table("| reason | what is ignored |", *rows)}


def _of_layouts() -> dict[str, str]:
    pages = []
    for inside in (*INSIDE, OPAQUE):
        names = ", ".join(f"`{one.name}`" for one in ADAPTERS.values() if one.inside is inside)
        pages.append(f"| {names} | `{inside.bytes}` | {inside.sentence} |")
    blocks = []
    for part in BETWEEN:
        begins = f"`{part.name}`" if part.name else ""
        blocks.append(f"| {begins} | `{part.bytes.format('page')}` | {part.sentence} |")
    refused = (f"| {one.why.format(blocks='B')} | {one.sentence} |" for one in REFUSALS)
    return {
        "pages": _table("| layouts | a page | where it comes from |", *pages),
        "blocks": _table("| name begins with | the cache | where it comes from |", *blocks),
        "refused": _table("| refused because | where such a cache comes from |", *refused),
    }


def _of_operations() -> dict[str, str]:
    rows = []
    for rule in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]:
        words, expr = rule["annotations"], rule["expr"].replace("|", "\\|")
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"`\1`", words["summary"])
        page = words["docs"].removeprefix("operations.md")
        what = f"{words['remedy']} [More]({page})"
        rows.append(f"| `{rule['alert']}` | {summary} | `{expr}` | {rule.get('for', '')} | {what} |")
    return {"alerts": _table("| alert | means | condition | for | what to do |", *rows)}


def _of_tiers() -> dict[str, str]:
    every = TierSpec.model_fields
    out = {"keys": config_errors.keys_table({key: field for key, field in every.items() if key != "kind"})}
    for kind in plugins.own(plugins.TIERS):
        fields = spec_of(plugins.TIERS, kind).model_fields
        out[f"keys-{kind}"] = config_errors.keys_table({key: one for key, one in fields.items() if key not in every})
    return out


def _of_tracing() -> dict[str, str]:
    from kvpipe.connectors.vllm.metrics import METRICS

    rows = []
    for name, kind in EVENTS.items():
        common = (Transition if issubclass(kind, Transition) else Event).__struct_fields__
        fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__ if field not in common)
        sentence = str(kind.__doc__).strip().split("\n\n", maxsplit=1)[0].replace("\n", " ")
        rows.append(f"| `{name}` | {logging.getLevelName(kind.level).lower()} | {sentence} | {fields} |")
    reasons = (f"| `{why}` | {sentence} |" for why, sentence in REASONS.items())
    metrics = []
    for name, one in METRICS.items():
        metrics.append(f"| `{one.full_name(name)}` | {one.kind} | {f'`{one.label}`' * bool(one.label)} | {one.text} |")
    return {
        "events": _table("| event | level | meaning | its own fields |", *rows),
        "reasons": _table("| reason | it means |", *reasons),
        "metrics": _table("| metric | kind | its own label | what it is |", *metrics),
    }


PAGES: Final[Mapping[str, Callable[[], dict[str, str]]]] = {
    "configuration.md": lambda: {"keys": config.markdown_table().replace("](docs/", "](")},
    "counters.md": _of_counters,
    "hints.md": _of_hints,
    "layouts.md": _of_layouts,
    "operations.md": _of_operations,
    "quotas.md": lambda: {"keys": config_errors.keys_table(QuotaSpec.model_fields)},
    "tiers.md": _of_tiers,
    "tracing.md": _of_tracing,
}
"""For the name of each page, the function that makes the tables of this page."""


def fresh(page: str) -> str:
    """Return the text of a page with the tables that the present code gives."""
    return doc_tables.fill_tables((DOCS / page).read_text(encoding="utf-8"), PAGES[page]())


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        (DOCS / page).write_text(fresh(page), encoding="utf-8")
        sys.stdout.write(f"{DOCS / page}\n")
