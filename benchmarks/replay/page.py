"""Draws the pictures of `docs/results/traces.json`, and a self-contained page with these pictures and all figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import pictures
from benchmarks.pictures import BOUND, KVPIPE, KVPIPE_MORE, OTHER, table
from benchmarks.replay import announced, report
from benchmarks.replay.replay import BELADY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WHERE: Final = {
    "device": "#6f7681", "memory": KVPIPE, "disk": "#6ea3dd", "network": KVPIPE_MORE, "computed": BOUND,
}  # fmt: skip
_OURS: Final = "sessions"
_HINTED: Final = "sessions with hints"
_SHOWN: Final = {_OURS: "sessions (kvpipe's default)", BELADY: "the best possible"}


def write(found: dict[str, Any], path: Path) -> None:
    """Write the picture and the page beside the JSON at `path`. `found` is the content of the JSON."""
    path.with_name(f"{path.stem}-agents.svg").write_text(picture(found), encoding="utf-8")
    path.with_suffix(".html").write_text(html(found), encoding="utf-8")


def picture(found: dict[str, Any]) -> str:
    """Return the picture of the coding agents' hit rates by capacity, with and without hints of resumes."""
    by = report.rates(found["yardstick"], report.AGENTS)
    best = by.pop(BELADY, {})
    hinted = [some for name, some in report.hinted_rates(found).items() if "resume" in name]
    return _rates(report.AGENTS, by | ({_HINTED: hinted[0]} if hinted else {}) | {BELADY: best})


def _rates(workload: str, by: dict[str, dict[float, float]]) -> str:
    """Return the chart of one workload, with a group of bars per capacity and a bar per policy."""
    from matplotlib.ticker import PercentFormatter

    shares = sorted(set.intersection(*(set(some) for some in by.values() if some)))
    by = {name: some for name, some in by.items() if some}
    colours = _colours(by)

    def draw(axes: Axes) -> None:
        width = 0.88 / len(by)
        for number, (name, some) in enumerate(by.items()):
            left = [at + width * (number - (len(by) - 1) / 2) for at in range(len(shares))]
            bars = axes.bar(left, [some[share] for share in shares], width * 0.94, color=colours[name])
            axes.bar_label(bars, [f"{100 * some[share]:.0f}" for share in shares], padding=1, fontsize=9)
        axes.set_xticks(range(len(shares)), [report.percent(share) for share in shares])
        axes.set_xlabel("pool, as a share of all chunks")
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylabel("prompt tokens that hit")
        axes.grid(axis="y")
        pictures.explain(axes, {_SHOWN.get(name, name): colours[name] for name in by})

    message = "tokens that hit"
    if shares and _OURS in by and "lru" in by:
        points = 100 * (by[_OURS][shares[0]] - by["lru"][shares[0]])
        message = f"sessions beats LRU by {points:.0f} points"
    title = _capital(f"{workload}: {message}")
    return pictures.chart(title, draw, height_in=3.6)


def _sources(workload: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a chart with a bar per replay of a workload with tiers: the sources of tokens, and the TTFT."""
    from matplotlib.ticker import PercentFormatter

    rows = sorted(rows, key=lambda one: (one["policy"] == report.NONE, one["behind"], one["policy"]), reverse=True)
    names = [label(row).partition(": ")[2] for row in rows]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for where, colour in _WHERE.items():
            part = [row["shares"].get(where, 0.0) for row in rows]
            axes.barh(names, part, left=left, color=colour)
            left = [before + more for before, more in zip(left, part, strict=True)]
        for at, row in enumerate(rows):
            axes.text(1.01, at, _ttft(row), va="center")
        axes.set_xlim(0, 1.3)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("where prompt tokens come from; right: first token within s, 50 / 90 / 99 % of requests")
        pictures.explain(axes, _WHERE)

    late_s = {row["policy"]: row["ttft_s"]["0.9"] for row in rows if not row["behind"]}
    message = "where tokens come from"
    if {_OURS, report.NONE} <= late_s.keys():
        message = f"90 % of first tokens in {late_s[_OURS]:.2g} instead of {late_s[report.NONE]:.2g} s"
    title = _capital(f"{workload}: {message}")
    return pictures.chart(title, draw, height_in=1.7 + 0.34 * len(rows))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def label(row: dict[str, Any]) -> str:
    """Return the label of a replay."""
    if row["policy"] == report.NONE:
        return f"{row['workload']}: without kvpipe"
    places = f"memory {report.percent(row['host'])}" + (f", {row['behind']}" if row["behind"] else "")
    return f"{row['workload']}: {places}, {row['policy']}"


def _ttft(row: dict[str, Any]) -> str:
    return " / ".join(f"{row['ttft_s'][point]:.3g}" for point in ("0.5", "0.9", "0.99"))


def _colours(names: Iterable[str]) -> dict[str, str]:
    others = iter(OTHER * len(report.POINTS))
    known = {_OURS: KVPIPE, _HINTED: KVPIPE_MORE, BELADY: BOUND}
    return {name: known.get(name) or next(others) for name in names}


_ABOUT: Final = (
    "{cpu}, Python {python}, {date}, {commit}. No engine and no device: hit rates, bytes and order are those of "
    "kvpipe's own catalog, policies and scheduler side. Times are by the cost model below, but for the scheduler's, "
    "which are measured. benchmarks/replay/README.md says how."
)

_ANNOUNCED: Final = (
    "Coding agents, with less memory than in the cost model: its share of all chunks stands first. Each prompt's "
    "client announces, when it is over, when the next one comes that begins with at least half of it; the pause is "
    "wrong by a log-normal factor with sigma. Or only prompts are announced that nothing goes on with."
)

# ---- the page -------------------------------------------------------------------------------------------------------


def html(found: dict[str, Any]) -> str:
    """Return the whole page."""
    machine, model = found["machine"], found["model"]
    body = [
        "<h1>Real traces, replayed in virtual time</h1>",
        f"<p>{_ABOUT.format(**{name: escape(str(value)) for name, value in machine.items()})}</p>",
    ]
    for name in dict.fromkeys(row["workload"] for row in found["yardstick"]):
        by = report.rates(found["yardstick"], name)
        body += [f"<h2>{escape(name)}</h2>", _rates(name, by), _rates_table(by)]
    body.append("<h2>With tiers</h2>")
    for name in dict.fromkeys(row["workload"] for row in found["tiers"]):
        body.append(_sources(name, [row for row in found["tiers"] if row["workload"] == name]))
    body.append(_tiers_table(found["tiers"]))
    if found.get("prefetch"):
        body += ["<h2>Resumes that are announced</h2>", f"<p>{_ANNOUNCED}</p>"]
        body.append(table(announced.HEADS, announced.table(found)))
    body.append("<h2>The cost model</h2>")
    places = [(f"{name}: {key}", value) for name, one in found.get("places", {}).items() for key, value in one.items()]
    body.append(table(("", ""), ((key, f"{value:g}") for key, value in [*model.items(), *places])))
    return pictures.page("replayed traces", body)


def _rates_table(by: dict[str, dict[float, float]]) -> str:
    shares, best = sorted({share for some in by.values() for share in some}), by.get(BELADY, {})
    rows = (
        (name, *(f"{some[s]:.3f} ({some[s] / best[s]:.2f})" if s in some and s in best else "" for s in shares))
        for name, some in by.items()
    )
    return table(("hit rate (of Belady's)", *(report.percent(share) for share in shares)), rows)


def _tiers_table(tiers: Sequence[dict[str, Any]]) -> str:
    rows = (
        (
            label(row),
            *(f"{row['shares'].get(where, 0):.1%}" for where in _WHERE),
            _ttft(row),
            f"{row['ttft_s_mean']:.3g}",
            ", ".join(f"{way} {size / 1e12:.2f}" for way, size in row["moved"].items() if size),
            f"{row['us_per_request']:.0f}",
        )
        for row in tiers
    )
    heads = ("", *_WHERE, "TTFT s at 50/90/99 %", "mean", "TB moved", "scheduler us per request")
    return table(heads, rows)
