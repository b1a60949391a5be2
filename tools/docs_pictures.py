"""Pictures for the site, as SVG and without any library: machines, a timeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from kvpipe.trace.spans import Timeline

_COLOURS = ("#3b6fb6", "#2e7d5b", "#a8671a", "#8a4fa3", "#b3452f", "#4b7f8c", "#6b6b2a", "#a34f7c")
_STYLE: Final = "text{font:13px system-ui,sans-serif;fill:currentColor}.s{font-size:11px}.e{text-anchor:end}"
_ARROW = re.compile(r"^(\[\*\]|\w+) --> (\[\*\]|\w+)(?:: (.*))?$")


def svg(width: float, height: float, body: Iterable[str], *, background: str = "") -> str:
    """Return a whole picture of `width` x `height` pixels. Without a `background` the page's colours show through."""
    paper = f'<rect width="100%" height="100%" fill="{background}"/>' if background else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'style="max-width:100%;height:auto" role="img"><style>{_STYLE}</style>{paper}{"".join(body)}</svg>\n'
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


# ---- machines -------------------------------------------------------------------------------------------------------

_BOX, _ROW, _GAP, _LANE, _CHAR = 170, 22, 16, 16, 7


def machine(mermaid: Sequence[str]) -> str:
    """Return the picture of a mermaid state diagram: a box per state, and a line for each state that is entered.

    A box has a row for each next state, with the events that lead there, and a dot from which a line goes to that
    state.
    """
    arrows = [match.groups() for line in mermaid if (match := _ARROW.match(line.strip()))]
    initial = next(to for was, to, _ in arrows if was == "[*]")
    finals = {was for was, to, _ in arrows if to == "[*]"}
    moves = [(was, to, sentence or "") for was, to, sentence in arrows if "[*]" not in {was, to}]
    states = list(dict.fromkeys([initial, *(one for was, to, _ in moves for one in (was, to)), *finals]))
    leaves = {state: [move for move in moves if move[0] == state] for state in states}
    top: dict[str, float] = {}
    y = 8.0
    for state in states:
        top[state] = y
        y += _ROW * max(1, len(leaves[state])) + 2 * _ROW / 3 + _GAP
    entered = [state for state in states if any(to == state for _, to, _ in moves)]
    lane = {state: _BOX + 26 + _LANE * i for i, state in enumerate(entered)}
    labels = _BOX + 34 + _LANE * len(entered)
    body = []
    for state in entered:
        colour, into = _COLOURS[entered.index(state) % len(_COLOURS)], top[state] + 8
        rows = [
            top[was] + _ROW * leaves[was].index((was, to, sentence)) + 26 for was, to, sentence in moves if to == state
        ]
        body.append(_line([(lane[state], min(*rows, into)), (lane[state], max(*rows, into))], colour))
        body.append(_line([(lane[state], into), (_BOX + 7, into)], colour))
        body.append(f'<path d="M{_BOX},{into} l8,-4 v8 z" fill="{colour}"/>')
        for row in rows:
            body.append(_line([(_BOX, row), (lane[state], row)], colour))
            body.append(f'<circle cx="{lane[state]}" cy="{row}" r="3.5" fill="{colour}"/>')
    for state in states:
        tall = _ROW * max(1, len(leaves[state])) + 2 * _ROW / 3
        edge = ' stroke-width="3"' if state in finals else ""
        body.append(
            f'<rect x="2" y="{top[state]}" width="{_BOX - 2}" height="{tall:.0f}" rx="5" fill="none" '
            f'stroke="currentColor"{edge}/>'
        )
        body.append(_text(12, top[state] + 20, f"▸ {state}" if state == initial else state))
        for i, (_, to, sentence) in enumerate(leaves[state]):
            body.append(_text(labels, top[state] + _ROW * i + 30, f"{sentence} → {to}", "s"))
    longest = max((len(f"{sentence} → {to}") for _, to, sentence in moves), default=0)
    return svg(labels + _CHAR * longest, y, body)


# ---- timelines ------------------------------------------------------------------------------------------------------

_WIDE, _THICK = 860, 9
_KINDS: Final = {
    "waiting": "#c9b458", "loading": "#3b6fb6", "running": "#2e7d5b", "preempted": "#b3452f",
    "forward": "#777", "load": "#3b6fb6", "save": "#2e7d5b", "copy_failed": "#b3452f",
}  # fmt: skip


def timeline(made: Timeline, begin_ns: int, end_ns: int) -> str:
    """Return the picture of a trace's timeline between two times: a band per lane, and a colour per kind of span."""
    y, body, seen = 30.0, [], []
    scale = _WIDE / (end_ns - begin_ns)
    for number, lane in enumerate(made.lanes):
        drawn = [
            span
            for span in made.spans
            if span.lane == number and span.kind in _KINDS and span.end_ns > begin_ns and span.begin_ns < end_ns
        ]
        if not drawn:
            continue
        side = "scheduler" if lane.rank < 0 else f"rank {lane.rank}"
        body.append(_text(122, y + 10, f"{side}: {lane.name}", "e s"))
        for span in drawn:
            x = 130 + max(0, span.begin_ns - begin_ns) * scale
            width = (min(span.end_ns, end_ns) - max(span.begin_ns, begin_ns)) * scale
            body.append(
                f'<rect x="{x:.2f}" y="{y + (_THICK + 2) * span.row:.1f}" width="{max(width, 0.8):.2f}" '
                f'height="{_THICK}" fill="{_KINDS[span.kind]}"><title>{escape(span.name)}</title></rect>'
            )
            seen.append(span.kind)
        y += (_THICK + 2) * (1 + max(span.row for span in drawn)) + 12
    for i, kind in enumerate(one for one in _KINDS if one in seen):
        body.append(f'<rect x="{130 + 95 * i}" y="8" width="10" height="10" fill="{_KINDS[kind]}"/>')
        body.append(_text(144 + 95 * i, 17, kind.replace("_", " "), "s"))
    body.append(_text(130, y + 6, "0 ms", "s"))
    body.append(_text(130 + _WIDE, y + 6, f"{(end_ns - begin_ns) / 1e6:.0f} ms", "e s"))
    return svg(150 + _WIDE, y + 14, body, background="#fff")
