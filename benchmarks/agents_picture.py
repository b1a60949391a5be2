"""The picture of `docs/results/agents.json`: when first tokens come, by users, and how many users come in time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from benchmarks import pictures
from benchmarks.pictures import COLOURS, GREY, WIDTH, legend, svg, text

_COLOURS: Final = {
    "vLLM's prefix cache": COLOURS[2],
    "kvpipe": COLOURS[0],
    "kvpipe with a disk": COLOURS[3],
    "a cache that holds all": COLOURS[1],
}
_TOP, _PLOT, _LEFT, _CURVES, _BARS = 64, 200, 46, 430, 560


def write(found: dict[str, Any], path: Path) -> None:
    """Write it beside the JSON at `path`, from its content."""
    pictures.write(picture(found), path.with_suffix(".svg"))


def picture(found: dict[str, Any]) -> str:
    """Return it: a line per engine on the left, a bar per engine on the right."""
    tried: dict[str, list[dict[str, float]]] = found["tried"]
    colours = {name: _COLOURS.get(name, GREY) for name in tried}
    body = [text(_LEFT, 20, "Coding agents on a real engine: users added until first tokens come late", "b")]
    body += legend(colours, _LEFT, 42)
    body += _curves(tried, found["limit_s"], colours)
    body += _bars(tried, found["limit_s"], colours)
    return svg(_TOP + _PLOT + 48, body)


def _curves(tried: dict[str, list[dict[str, float]]], limit_s: float, colours: dict[str, str]) -> list[str]:
    """Return the 95th percentile of the time to the first token, as a share of the limit, by users."""
    users = [one["users"] for some in tried.values() for one in some]
    least, octaves = math.log2(min(users)), math.log2(max(users) / min(users)) or 1.0

    def x(of: float) -> float:
        return _LEFT + (math.log2(of) - least) / octaves * _CURVES

    def y(late_s: float) -> float:
        return _TOP + _PLOT * (1 - min(late_s / limit_s, 2.0) / 2)

    body = [text(_LEFT, _TOP - 6, "95 % of first tokens come within (1: the limit)", "s")]
    for share in (0, 0.5, 1, 1.5, 2):
        dash = ' stroke-dasharray="5 4"' if share == 1 else ""
        at, colour = y(share * limit_s), "#222" if share == 1 else "#ddd"
        body.append(f'<path d="M{_LEFT} {at:.1f}h{_CURVES}" stroke="{colour}"{dash}/>')
        body.append(text(_LEFT - 6, at + 4, f"{share:g}", "s e"))
    marks = [2**octave for octave in range(math.ceil(least), math.floor(least + octaves) + 1)]
    body += [text(x(mark), _TOP + _PLOT + 16, str(mark), "s m") for mark in marks]
    body.append(text(_LEFT + _CURVES / 2, _TOP + _PLOT + 34, "users", "m"))
    for name, some in tried.items():
        points = [(x(one["users"]), y(one["late_s"])) for one in sorted(some, key=lambda one: one["users"])]
        way = " ".join(f"{at:.1f},{up:.1f}" for at, up in points)
        body.append(f'<polyline points="{way}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        body += [f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3" fill="{colours[name]}"/>' for at, up in points]
    return body


def _bars(tried: dict[str, list[dict[str, float]]], limit_s: float, colours: dict[str, str]) -> list[str]:
    """Return the requests per second of the most users who are served in time."""
    most = {
        name: max((one for one in some if one["late_s"] <= limit_s), key=lambda one: one["users"], default=None)
        for name, some in tried.items()
    }
    top = max((one["per_s"] for one in most.values() if one), default=1.0)
    body, wide = [text(_BARS, _TOP - 6, "requests per second, users in time", "s")], (WIDTH - 10 - _BARS) / len(most)
    for at, (name, one) in enumerate(most.items()):
        left, tall = _BARS + at * wide, (one["per_s"] / top if one else 0.0) * (_PLOT - 16)
        foot, middle = _TOP + _PLOT, left + wide / 2
        body.append(
            f'<rect x="{left + 6:.1f}" y="{foot - tall:.1f}" width="{wide - 12:.1f}" height="{tall:.1f}" '
            f'fill="{colours[name]}"/>'
        )
        body.append(text(middle, foot - tall - 4, f"{one['per_s']:.2g}" if one else "0", "m b"))
        body.append(text(middle, foot + 16, f"{one['users']:.0f} users" if one else "nobody", "s m"))
    return body
