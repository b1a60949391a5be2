"""Draws the picture of `docs/results/agents.json`, and a self-contained page with the picture and all figures.

`python -m benchmarks.agents_picture` writes both files again, and measures nothing.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import pictures
from benchmarks.pictures import BOUND, KVPIPE, OTHER, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "agents.json"
_KINDS: Final = {"kvpipe": KVPIPE, "without kvpipe": OTHER[0], "the best that a cache can do": BOUND}
_BEST: Final = "a cache that holds all"
_Tried = dict[str, list[dict[str, float]]]


def write(found: dict[str, Any], path: Path) -> None:
    """Write the picture and the page beside the JSON at `path`. `found` is the content of the JSON."""
    path.with_suffix(".svg").write_text(picture(found), encoding="utf-8")
    path.with_suffix(".html").write_text(html(found), encoding="utf-8")


def picture(found: dict[str, Any]) -> str:
    """Return a chart with a bar per engine: the requests per second with the most users that are served in time."""
    tried: _Tried = found["tried"]
    most = {name: _most(some, found["limit_s"]) for name, some in tried.items()}
    per_s = {name: one["per_s"] if one else 0.0 for name, one in most.items()}
    names = sorted(most, key=lambda name: per_s[name])
    kinds = {name: _kind(name) for name in names}

    def draw(axes: Axes) -> None:
        bars = axes.barh(names, [per_s[name] for name in names], color=[_KINDS[kinds[name]] for name in names])
        says = [f"{one['per_s']:.3g} for {one['users']:.0f} users" if (one := most[name]) else "0" for name in names]
        axes.bar_label(bars, says, padding=5)
        axes.margins(x=0.2)
        axes.set_xlabel(f"requests per second, while 95 % of first tokens come within {found['limit_s']:.3g} s")
        pictures.explain(axes, {kind: _KINDS[kind] for kind in _KINDS if kind in kinds.values()})

    return pictures.chart(_message(per_s), draw, height_in=1.7 + 0.42 * len(names))


def _kind(name: str) -> str:
    return "kvpipe" if name.startswith("kvpipe") else list(_KINDS)[1 + (name == _BEST)]


def _message(per_s: dict[str, float]) -> str:
    """Return the chart's title: the throughput with kvpipe relative to the best engine without kvpipe."""
    best = {kind: max((one for name, one in per_s.items() if _kind(name) == kind), default=0.0) for kind in _KINDS}
    ours, others, _ = best.values()
    if not ours or not others:
        return "Requests of coding agents that are served in time"
    return f"With kvpipe an engine serves {ours / others:.2g} times as many requests of coding agents in time"


def _most(some: list[dict[str, float]], limit_s: float) -> dict[str, float] | None:
    return max((one for one in some if one["late_s"] <= limit_s), key=lambda one: one["users"], default=None)


# ---- the page -------------------------------------------------------------------------------------------------------

_ABOUT: Final = (
    "{cpu}, {cores} cores, Python {python}, torch {torch}, {date}, {commit}. A real engine with a small model, and "
    "sessions of the recorded trace with prompts and pauses as many times shorter as benchmarks/agents.py says. "
    "Users are added until the 95th percentile of the time to the first token is above {limit_s:.3g} s."
)


def html(found: dict[str, Any]) -> str:
    """Return the whole page."""
    about = {name: escape(str(value)) for name, value in found["machine"].items()}
    limit_s, body = found["limit_s"], ["<h1>Coding agents on a real engine</h1>"]
    body += [f"<p>{_ABOUT.format(**about, limit_s=limit_s)}</p>", picture(found), "<h2>Figures</h2>"]
    figures = (
        (one["name"], f"{one['value']:.3g} {one['unit']}", f"{one['limit']:g} {one['unit']}",
         "yes" if one["holds"] else "no", one["baseline"])
        for one in found["figures"]
    )  # fmt: skip
    body.append(table(("", "measured", "at least", "holds", "of"), figures))
    tried = (
        (name, f"{one['users']:.0f}", f"{one['per_s']:.2f}", f"{one['ttft_s']:.3f}", f"{one['late_s']:.3f}",
         "yes" if one["late_s"] <= limit_s else "no")
        for name, some in found["tried"].items()
        for one in sorted(some, key=lambda one: float(one["users"]))
    )  # fmt: skip
    heads = ("engine", "users", "requests/s", "TTFT s at 50 %", "at 95 %", "in time")
    body += ["<h2>All that was tried</h2>", table(heads, tried)]
    return pictures.page("coding agents", body)


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text(encoding="utf-8")), RESULTS)
