"""What pictures and pages of benchmarks share: an SVG's frame and words, a PNG made of it by a real browser, tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from kvpipe.testing.browser import Browser, BrowserMissingError

COLOURS: Final = ("#3b6fb6", "#2e7d5b", "#a8671a", "#8a4fa3", "#4b7f8c", "#6b6b2a")
GREY: Final = "#b9bec6"
WIDTH: Final = 860
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.s{font-size:11px}.m{text-anchor:middle}.e{text-anchor:end}"
    ".b{font-weight:600}"
)
_PAGE_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "body{background:#fff}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}"
    "td{font-variant-numeric:tabular-nums}"
)


def svg(height: float, body: Iterable[str]) -> str:
    """Return a whole picture, `WIDTH` x `height` pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;height:auto"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(body)}</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words. `kind`: s(mall), b(old), m(iddle) or e(nd) at `x`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def legend(colours: dict[str, str], x: float, y: float) -> list[str]:
    """Return what each colour is, in a line."""
    out = list[str]()
    for name, colour in colours.items():
        out += [f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>', text(x + 14, y, name, "s")]
        x += 34 + 7 * len(name)
    return out


def write(picture: str, path: Path) -> None:
    """Write an SVG, and beside it a PNG of twice its pixels; without a browser it prints that, and the old PNG goes."""
    path.write_text(picture, encoding="utf-8")
    png = path.with_suffix(".png")
    try:
        with Browser() as browser:
            browser.open(path.resolve().as_uri())
            height = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', picture)[0])
            png.write_bytes(browser.screenshot(WIDTH, height, scale=2))
    except BrowserMissingError as e:
        png.unlink(missing_ok=True)
        print(f"no {png.name}: {e}", file=sys.stderr)


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole page, which needs nothing else."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>kvpipe: {escape(title)}</title><style>{_PAGE_STYLE}</style>{''.join(body)}</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of a page."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
