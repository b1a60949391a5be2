"""The pictures of `docs/results/traces.json`, and a page with them and all figures that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks import pictures
from benchmarks.pictures import COLOURS, GREY, WIDTH, legend, svg, table, text
from benchmarks.replay import announced, report
from benchmarks.replay.replay import BELADY

_WHERE: Final = {
    "device": "#8a4fa3", "memory": "#3b6fb6", "disk": "#2e7d5b", "network": "#a8671a", "computed": "#b9bec6",
}  # fmt: skip
_PLOT, _LEFT, _ROW = 170, 40, 24


def write(found: dict[str, Any], path: Path) -> None:
    """Write them beside the JSON at `path`, from its content."""
    pictures.write(picture(found), path.with_suffix(".svg"))
    by = report.rates(found["yardstick"], report.AGENTS)
    best = by.pop(BELADY, {})
    hinted = {name: some for name, some in report.hinted_rates(found).items() if "resume" in name}
    pictures.write(
        _below([_rates(report.AGENTS, by | hinted | {BELADY: best})]),
        path.with_name(f"{path.stem}-agents.svg"),
    )
    path.with_suffix(".html").write_text(html(found), encoding="utf-8")


def picture(found: dict[str, Any]) -> str:
    """Return one picture: hit rates by capacity of each workload, then where tokens come from with tiers."""
    names = dict.fromkeys(row["workload"] for row in found["yardstick"])
    drawn = [_rates(name, report.rates(found["yardstick"], name)) for name in names]
    return _below([*drawn, _sources(found["tiers"])])


def _below(drawn: Iterable[tuple[list[str], float]]) -> str:
    """Return one picture of several with their heights, one below the other."""
    parts, y = list[str](), 0.0
    for body, height in drawn:
        parts.append(f'<g transform="translate(0 {y:.0f})">{"".join(body)}</g>')
        y += height
    return svg(y, parts)


def _rates(title: str, by: dict[str, dict[float, float]]) -> tuple[list[str], float]:
    """Return the bars of one workload: a group per capacity, a bar per policy; and its height."""
    names = list(by)
    colours = _colours(names)
    body = [text(_LEFT, 20, f"{title}: tokens that hit, by the pool's share of all chunks", "b")]
    body += legend(colours, _LEFT, 40)
    top, shares = 52, sorted({share for some in by.values() for share in some})
    for tenth in (0, 25, 50, 75, 100):
        y = top + _PLOT * (1 - tenth / 100)
        body += [f'<path d="M{_LEFT} {y:.1f}H{WIDTH - 10}" stroke="#ddd"/>', text(4, y + 4, f"{tenth} %", "s")]
    group = (WIDTH - _LEFT - 20) / max(1, len(shares))
    bar = min(44.0, (group - 24) / max(1, len(names)))
    for at, share in enumerate(shares):
        left = _LEFT + at * group + (group - bar * len(names)) / 2
        for number, name in enumerate(names):
            rate = by[name].get(share)
            if rate is None:
                continue
            x, height = left + number * bar, rate * _PLOT
            body.append(
                f'<rect x="{x:.1f}" y="{top + _PLOT - height:.1f}" width="{bar - 3:.1f}" height="{height:.1f}" '
                f'fill="{colours[name]}"><title>{escape(name)}: {rate:.3f}</title></rect>'
            )
            body.append(text(x + (bar - 3) / 2, top + _PLOT - height - 3, f"{rate:.1%}".rstrip("%"), "s m"))
        body.append(text(_LEFT + (at + 0.5) * group, top + _PLOT + 16, f"{report.percent(share)} of all chunks", "m"))
    return body, top + _PLOT + 36


def _sources(rows: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """Return a bar per replay with tiers, of where tokens came from, and when the first token did."""
    body = [
        text(_LEFT, 20, "With a device's own cache, memory and tiers: where tokens come from, and when the first", "b")
    ]
    body += [text(_LEFT, 20 + 17, "token does, by the cost model (seconds, at 50, 90 and 99 % of requests)", "s")]
    body += legend(_WHERE, _LEFT, 56)
    y, left, width = 78.0, 330, 330
    for row in sorted(
        rows, key=lambda one: (one["workload"], one["policy"] != report.NONE, one["behind"], one["policy"])
    ):
        x = float(left)
        body.append(text(_LEFT, y + 13, label(row)))
        for where, colour in _WHERE.items():
            share = row["shares"].get(where, 0.0)
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{share * width:.1f}" height="{_ROW - 6}" fill="{colour}">'
                f"<title>{where}: {share:.1%}</title></rect>"
            )
            x += share * width
        body.append(text(left + width + 12, y + 13, _ttft(row), "s"))
        y += _ROW
    return body, y + 16


def label(row: dict[str, Any]) -> str:
    """Return what a replay is called."""
    if row["policy"] == report.NONE:
        return f"{row['workload']}: without kvpipe"
    places = f"memory {report.percent(row['host'])}" + (f", {row['behind']}" if row["behind"] else "")
    return f"{row['workload']}: {places}, {row['policy']}"


def _ttft(row: dict[str, Any]) -> str:
    return " / ".join(f"{row['ttft_s'][point]:.3g}" for point in ("0.5", "0.9", "0.99"))


def _colours(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name != BELADY]
    found = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(others)}
    return found | ({BELADY: GREY} if BELADY in names else {})


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
        picture(found),
    ]
    for name in dict.fromkeys(row["workload"] for row in found["yardstick"]):
        body += [f"<h2>{escape(name)}</h2>", _rates_table(report.rates(found["yardstick"], name))]
    body += ["<h2>With tiers</h2>", _tiers_table(found["tiers"])]
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
