"""Shared functions for the pictures and pages of benchmarks: charts by matplotlib as SVG, and tables.

Each chart has one message, which is its title. Equal data gives equal bytes, so tests can detect outdated files.
Matplotlib is imported when a chart is drawn, because its import takes seconds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

KVPIPE: Final = "#2563b0"
KVPIPE_MORE: Final = "#12305c"
"""The colour of kvpipe with an addition, such as hints or another tier."""
OTHER: Final = ("#a3a9b2", "#6f7681")
HELD, MISSED = "#2e7d5b", "#b3452f"
"""The colours of figures that keep their limits, and of figures that do not."""
BOUND: Final = "#e4e6ea"
"""The colour of the best result that any cache could have."""
_STYLE: Final[dict[RcKeyType, Any]] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#dddddd", "legend.frameon": False,
    "text.parse_math": False,
}  # fmt: skip
_PAGE_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "body{background:#fff}table{border-collapse:collapse;font-size:13px}svg{max-width:100%;height:auto}"
    "td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}"
    "td{font-variant-numeric:tabular-nums}"
)


def chart(title: str, draw: Callable[[Axes], None], *, height_in: float, width_in: float = 9) -> str:
    """Return a picture as SVG, with a title of at most 75 characters. `draw` draws into the picture's axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    lines = out.getvalue().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("<svg"))
    return "\n".join(line.rstrip() for line in lines[start:]) + "\n"  # pages can embed SVG without an XML declaration


def explain(axes: Axes, colours: Mapping[str, str]) -> None:
    """Draw the legend above the chart."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=patches, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(patches), handlelength=1)


def beside_limits(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a bar per figure, whose length is the figure as a share of its limit.

    `rows` are from `benchmarks.report`.
    """

    def draw(axes: Axes) -> None:
        shares = [min(row["value"] / row["limit"] if row["limit"] else 1.0, 2.0) for row in rows]
        axes.barh(range(len(rows)), shares, color=[HELD if row["holds"] else MISSED for row in rows])
        for at, row in enumerate(rows):
            sign = "≥" if row["at_least"] else "≤"
            axes.text(2.05, at, f"{row['value']:.3g}, {sign} {row['limit']:g} {row['unit']}", va="center")
        axes.axvline(1, color="#777777", linestyle="--")
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 3)
        axes.set_xticks([])

    return chart(title, draw, height_in=0.9 + 0.26 * len(rows), width_in=12)


def page(title: str, body: Iterable[str]) -> str:
    """Return a self-contained HTML page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>kvpipe: {escape(title)}</title><style>{_PAGE_STYLE}</style>{''.join(body)}</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
