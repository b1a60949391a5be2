"""Copies code into docs/new-engine.md. `python -m tests.second_engine.page` writes the page again."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpipe.connectors.vllm.trial import doc_tables
from kvpipe.protocol import engine as base
from kvpipe.scheduler import hooks
from kvpipe.testing.engine_conformance import EngineConformance, EngineDriver
from tests.second_engine import adapter, engine

PAGE: Final = Path(__file__).parents[2] / "docs" / "new-engine.md"
_QUOTED: Final = {
    "geometry": adapter.make_geometry,
    "construction": adapter.KVPipe.__init__,
    "admit": engine.Engine._admit,
    "loaded": engine.Engine._loaded,
    "begin": adapter.KVPipe.begin,
    "layers": adapter.KVPipe.before,
    "end": adapter.KVPipe.end,
    "computed": engine.Engine._computed,
}
_PROTOCOLS: Final = (
    base.Request, base.Adapter, base.Blocks, base.Block, base.Step, base.Recovery, hooks.Published, EngineDriver,
)  # fmt: skip


def _quote(quoted: object) -> str:
    source = textwrap.dedent(inspect.getsource(quoted))  # type: ignore[arg-type]
    return f"```python\n{source}```\n"


def _members(protocol: type) -> Iterator[tuple[str, object]]:
    for name, member in vars(protocol).items():
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member)):
            yield name, member


def _fields(protocol: type) -> str:
    """Return a table with a row per member of a protocol: name, docstring, and default if any member has a default."""
    rows = []
    for name, member in _members(protocol):
        made = member.fget if isinstance(member, property) else member
        assert inspect.isfunction(made)
        takes = "" if isinstance(member, property) else f"({', '.join([*inspect.signature(made).parameters][1:])})"
        _, _, default = inspect.getsource(made).rpartition("    return ")
        shown = f"`{default.strip()}`" if default.count("\n") == 1 else ""
        rows.append((f"`{name}{takes}`", " ".join((inspect.getdoc(made) or "").split()), shown))
    if any(default for _, _, default in rows):
        titles: tuple[str, ...] = (protocol.__name__, "what it is", "if left out")
    else:
        titles, rows = (protocol.__name__, "what it is"), [row[:2] for row in rows]  # type: ignore[misc]
    table = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


def _claims() -> str:
    claims = {name: " ".join((one.__doc__ or "").split()) for name, one in vars(EngineConformance).items()}
    rows = [f"| `{name}` | {message} |" for name, message in claims.items() if name.startswith("test_")]
    return "\n".join(["| claim | what it demands |", "|---|---|", *rows]) + "\n"


def fill(text: str) -> str:
    """Return the page's text with the present code and docstrings."""
    tables = {name: _quote(quoted) for name, quoted in _QUOTED.items()}
    tables |= {protocol.__name__: _fields(protocol) for protocol in _PROTOCOLS}
    return doc_tables.fill_tables(text, tables | {"claims": _claims()})


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
