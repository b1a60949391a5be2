"""The tables of `docs/` that are made from the code. `python -m tests.unit.pages` writes them anew."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvpipe import config, config_errors, counters, plugins
from kvpipe.cache.miss_reasons import REASONS
from kvpipe.quota_spec import QuotaSpec
from kvpipe.scheduler import hints
from kvpipe.testing import doc_tables
from kvpipe.tiers.registry import spec_of
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace.events import Event
from kvpipe.trace.transitions import EVENTS, Transition
from kvpipe.transfer.layouts import ADAPTERS, BETWEEN, INSIDE, OPAQUE, REFUSALS

DOCS: Final = Path(__file__).parents[2] / "docs"


def _table(*rows: str) -> str:
    """Return a table in Markdown. The first row is its head."""
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


def _of_tiers() -> dict[str, str]:
    every = TierSpec.model_fields
    out = {"keys": config_errors.table({key: field for key, field in every.items() if key != "kind"})}
    for kind in plugins.own(plugins.TIERS):
        fields = spec_of(plugins.TIERS, kind).model_fields
        out[f"keys-{kind}"] = config_errors.table({key: one for key, one in fields.items() if key not in every})
    return out


def _of_tracing() -> dict[str, str]:
    from kvpipe.connectors.vllm.metrics import METRICS, PREFIX

    rows = []
    for name, kind in EVENTS.items():
        common = (Transition if issubclass(kind, Transition) else Event).__struct_fields__
        fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__ if field not in common)
        sentence = str(kind.__doc__).strip().split("\n\n", maxsplit=1)[0].replace("\n", " ")
        rows.append(f"| `{name}` | {logging.getLevelName(kind.level).lower()} | {sentence} | {fields} |")
    reasons = (f"| `{why}` | {sentence} |" for why, sentence in REASONS.items())
    metrics = []
    for name, one in METRICS.items():
        full, label = PREFIX + name + "_total" * (one.kind == "counter"), f"`{one.label}`" * bool(one.label)
        metrics.append(f"| `{full}` | {label} | {one.text} |")
    return {
        "events": _table("| event | level | meaning | its own fields |", *rows),
        "reasons": _table("| reason | it means |", *reasons),
        "metrics": _table("| metric | its own label | what it is |", *metrics),
    }


PAGES: Final[Mapping[str, Callable[[], dict[str, str]]]] = {
    "configuration.md": lambda: {"keys": config.markdown_table().replace("](docs/", "](")},
    "counters.md": _of_counters,
    "hints.md": _of_hints,
    "layouts.md": _of_layouts,
    "quotas.md": lambda: {"keys": config_errors.table(QuotaSpec.model_fields)},
    "tiers.md": _of_tiers,
    "tracing.md": _of_tracing,
}
"""What makes the tables of each page, by their names."""


def fresh(page: str) -> str:
    """Return the text of a page with its tables as the code has them."""
    return doc_tables.fill((DOCS / page).read_text(encoding="utf-8"), PAGES[page]())


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(fresh(page), encoding="utf-8")
        sys.stdout.write(f"{DOCS / page}\n")
