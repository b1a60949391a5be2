"""Fills the tables of `docs/tracing.md`: `python -m kvpipe.trace.page`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from kvpipe import doc_tables
from kvpipe.cache.miss_reasons import REASONS
from kvpipe.trace.events import EVENTS, Event, Transition

PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"


def events_table() -> str:
    """Return a row per event."""
    rows = ["| event | level | says | its own fields |", "|---|---|---|---|"]
    for name, kind in EVENTS.items():
        common = (Transition if issubclass(kind, Transition) else Event).__struct_fields__
        fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__ if field not in common)
        sentence = str(kind.__doc__).strip().split("\n\n", maxsplit=1)[0].replace("\n", " ")
        rows.append(f"| `{name}` | {logging.getLevelName(kind.level).lower()} | {sentence} | {fields} |")
    return "\n".join(rows) + "\n"


def reasons_table() -> str:
    """Return a row per reason of a miss."""
    rows = ["| reason | it means |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{why}` | {sentence} |" for why, sentence in REASONS.items())]) + "\n"


def fill(text: str) -> str:
    """Return the page's text with its tables as the code has them."""
    return doc_tables.fill(text, {"events": events_table(), "reasons": reasons_table()})


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
