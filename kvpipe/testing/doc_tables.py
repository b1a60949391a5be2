"""Tables in `docs/` that are made from the code, between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

from __future__ import annotations

from collections.abc import Mapping


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return the page's `text` with every table made anew. Raises `ValueError` where a mark is missing."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        at = text.index(begin) + len(begin)
        text = text[:at] + table + text[text.index(end, at) :]
    return text
