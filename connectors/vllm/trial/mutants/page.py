"""Generates the tables of docs/fuzzing.md: `python -m kvpipe.connectors.vllm.trial.mutants.page`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import kvpipe.connectors.vllm.trial.doc_tables
from kvpipe.connectors.vllm.trial.invariants import INVARIANTS, LAWS, SEEN_BY_TRIALS
from kvpipe.connectors.vllm.trial.mutants import MUTANTS
from kvpipe.connectors.vllm.trial.reach import MACHINES, reachable
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import MOVES
from kvpipe.connectors.vllm.trial.worlds import AXES, CONFLICTS

PAGE, VERDICTS = Path("docs/fuzzing.md"), Path("docs/results/mutants.json")
PROPOSED = Path("docs/results/proposed_mutants.json")


def tables(verdicts: list[dict[str, object]], proposed: Mapping[str, dict[str, int]]) -> dict[str, str]:
    """Return each table by its name, from the results of `make mutants` and `make propose-mutants`."""
    killed = {str(one["name"]): one for one in verdicts}
    return {
        "invariants": _table("law", "invariant", "sentence", rows=_invariants()),
        "moves": _table("move", "arguments: what happens", rows=((f"`{n}`", text) for n, text in MOVES.items())),
        "shapes": _table("shape", "settings", rows=((f"`{n}`", f"`{_differs(n)}`") for n in SHAPES)),
        "worlds": _table("axis", "values", rows=((f"`{n}`", _quoted(of)) for n, of in AXES.items())),
        "conflicts": _table("why", "values", rows=((why, _together(one)) for why, one in CONFLICTS)),
        "reach": _table("machine", "cells", "cells that do not reject", rows=_reach()),
        "mutants": _table(
            "mutant", "effect of the bug", "found by", "after",
            rows=(
                (f"`{n}`", one.does, f"`{killed[n]['by']}`", "its test" if one.test else f"{killed[n]['steps']} steps")
                for n, one in MUTANTS.items()
                if n in killed
            ),
        ),
        "proposed": _table(
            "folder", "mutants", "killed", "timed out", "survived", "share that survived",
            rows=((f"`{folder}`", *_counts(one)) for folder, one in proposed.items()),
        ),
    }  # fmt: skip


def _counts(one: dict[str, int]) -> Iterator[str]:
    yield from (str(one[name]) for name in ("mutants", "killed", "timed_out", "survived"))
    yield f"{one['survived'] / one['mutants']:.0%}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _together(one: dict[str, str]) -> str:
    return "; ".join(f"`{axis}`: {values.replace(' ', ', ')}" for axis, values in one.items())


def _invariants() -> Iterator[tuple[str, ...]]:
    for number, law in LAWS.items():
        names = [(one.name, one.sentence) for one in INVARIANTS.values() if number in one.laws]
        names += [(name, sentence) for name, (held, sentence) in SEEN_BY_TRIALS.items() if held == number]
        for i, (name, sentence) in enumerate(names):
            yield (f"{number}. {law}" if not i else "", f"`{name}`", sentence)


def _reach() -> Iterator[tuple[str, ...]]:
    can = reachable()
    for machine in MACHINES:
        cells = len(machine.states) * len(machine.events)
        yield machine.name, str(cells), str(sum(cell.machine == machine.name for cell in can))


def _differs(name: str) -> str:
    shape, plain = SHAPES[name], type(SHAPES[name])()
    return ", ".join(
        f"{field}={value!r}" for field, value, usual in zip(shape._fields, shape, plain, strict=True) if value != usual
    )


def _table(*head: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fill_conformance(text: str, verdicts: list[dict[str, object]], proposed: Mapping[str, dict[str, int]]) -> str:
    """Return `text` with every generated table made again."""
    return kvpipe.connectors.vllm.trial.doc_tables.fill_tables(text, tables(verdicts, proposed))


if __name__ == "__main__":
    read = [json.loads(file.read_text("utf-8")) for file in (VERDICTS, PROPOSED)]
    PAGE.write_text(fill_conformance(PAGE.read_text("utf-8"), *read), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
