"""The picture of `docs/results/agents.json`, and a page with it and all figures that needs nothing else.

`python -m benchmarks.agents_picture` writes them again and measures nothing.
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks import pictures
from benchmarks.pictures import COLOURS, GREY, WIDTH, svg, table, text

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "agents.json"
_COLOURS: Final = {
    "no cache": GREY,
    "vLLM's prefix cache": COLOURS[2],
    "kvpipe": COLOURS[0],
    "kvpipe with a disk": COLOURS[3],
    "a cache that holds all": COLOURS[1],
}
_TOP, _PLOT, _LEFT, _RIGHT, _ROW, _NAMES = 54, 200, 46, 20, 24, 250
_Tried = dict[str, list[dict[str, float]]]


def write(found: dict[str, Any], path: Path) -> None:
    """Write them beside the JSON at `path`, from its content."""
    pictures.write(picture(found), path.with_suffix(".svg"))
    path.with_suffix(".html").write_text(html(found), encoding="utf-8")


def picture(found: dict[str, Any]) -> str:
    """Return it: a line per engine, and below a bar per engine."""
    tried: _Tried = found["tried"]
    looks = _looks(list(tried))
    body = [text(_LEFT, 20, "Coding agents on a real engine: users added until first tokens come late", "b")]
    body += _curves(tried, found["limit_s"], looks)
    body += _bars(tried, found["limit_s"], looks)
    return svg(_TOP + _PLOT + 70 + _ROW * len(tried), body)


def _looks(names: list[str]) -> dict[str, tuple[str, bool]]:
    """Return each engine's colour, and whether it is a variant: what follows a comma does not change the colour."""
    split = [name.partition(", ") for name in names]
    others = [kind for kind in dict.fromkeys(kind for kind, _, _ in split) if kind not in _COLOURS]
    colours = _COLOURS | {kind: COLOURS[(4 + at) % len(COLOURS)] for at, kind in enumerate(others)}
    return {name: (colours[kind], bool(comma)) for name, (kind, comma, _) in zip(names, split, strict=True)}


def _curves(tried: _Tried, limit_s: float, looks: dict[str, tuple[str, bool]]) -> list[str]:
    """Return the 95th percentile of the time to the first token, as a share of the limit, by users."""
    users = [one["users"] for some in tried.values() for one in some]
    least, octaves, wide = math.log2(min(users)), math.log2(max(users) / min(users)) or 1.0, WIDTH - _LEFT - _RIGHT

    def x(of: float) -> float:
        return _LEFT + (math.log2(of) - least) / octaves * wide

    def y(late_s: float) -> float:
        return _TOP + _PLOT * (1 - min(late_s / limit_s, 2.0) / 2)

    body = [text(_LEFT, _TOP - 10, "95 % of first tokens come within (1: the limit)", "s")]
    for share in (0, 0.5, 1, 1.5, 2):
        dash = ' stroke-dasharray="5 4"' if share == 1 else ""
        at, colour = y(share * limit_s), "#222" if share == 1 else "#ddd"
        body.append(f'<path d="M{_LEFT} {at:.1f}h{wide}" stroke="{colour}"{dash}/>')
        body.append(text(_LEFT - 6, at + 4, f"{share:g}", "s e"))
    marks = [2**octave for octave in range(math.ceil(least), math.floor(least + octaves) + 1)]
    body += [text(x(mark), _TOP + _PLOT + 16, str(mark), "s m") for mark in marks]
    body.append(text(_LEFT + wide / 2, _TOP + _PLOT + 32, "users", "m"))
    for name, some in tried.items():
        (colour, variant), in_order = looks[name], sorted(some, key=lambda one: one["users"])
        way = " ".join(f"{x(one['users']):.1f},{y(one['late_s']):.1f}" for one in in_order)
        dash, fill = (' stroke-dasharray="4 3"', "#fff") if variant else ("", colour)
        body.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body += [
            f'<circle cx="{x(one["users"]):.1f}" cy="{y(one["late_s"]):.1f}" r="4" stroke="{colour}" fill="{fill}">'
            f"<title>{escape(name)}, {_got(one)}, 95 % within {one['late_s']:.3g} s</title></circle>"
            for one in in_order
        ]
    return body


def _bars(tried: _Tried, limit_s: float, looks: dict[str, tuple[str, bool]]) -> list[str]:
    """Return the requests per second of the most users who are served in time."""
    most = {name: _most(some, limit_s) for name, some in tried.items()}
    top, y = max((one["per_s"] for one in most.values() if one), default=1.0), _TOP + _PLOT + 58
    body = [text(_LEFT, y - 6, "requests per second of the most users who were served in time", "s")]
    for name, one in most.items():
        colour, variant = looks[name]
        wide = (one["per_s"] / top if one else 0.0) * (WIDTH - _NAMES - 180)
        dash, fill = (' stroke-dasharray="4 3"', "#fff") if variant else ("", colour)
        body.append(text(_NAMES - 8, y + 14, name, "s e"))
        body.append(
            f'<rect x="{_NAMES}" y="{y + 3}" width="{wide:.1f}" height="{_ROW - 8}" fill="{fill}" stroke="{colour}"'
            f"{dash}><title>{escape(name)}: {_got(one) if one else 'nobody'}</title></rect>"
        )
        body.append(text(_NAMES + wide + 8, y + 15, _got(one) if one else "nobody", "s"))
        y += _ROW
    return body


def _most(some: list[dict[str, float]], limit_s: float) -> dict[str, float] | None:
    return max((one for one in some if one["late_s"] <= limit_s), key=lambda one: one["users"], default=None)


def _got(one: dict[str, float]) -> str:
    return f"{one['users']:.0f} users: {one['per_s']:.3g} requests/s"


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
