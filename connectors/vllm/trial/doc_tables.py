"""Generates the tables in `docs/` that lie between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

from __future__ import annotations

from collections.abc import Mapping


def fill_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return the page's `text` with every table generated again.

    Raises `ValueError` if the page lacks a `<!-- -->` line of a table.
    """
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        at = text.index(begin) + len(begin)
        text = text[:at] + table + text[text.index(end, at) :]
    return text
