"""One word, one meaning: the glossary's words are in the code, and a class's name is used once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (?:`([\w.]+)`)? ?\|$", re.MULTILINE)


def _files() -> Iterator[Path]:
    for top in ("statemachine", "kvpipe", "connectors"):
        for file in (ROOT / top).rglob("*.py"):
            if file.relative_to(ROOT).parts[1] not in {"statemachine", "connectors"}:
                yield file


def _defined(name: str) -> bool:
    """Whether the dotted `name` is a module or package, or is bound at the top of one."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    tree = ast.parse(path.parent.with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        match node:
            case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) | ast.AnnAssign(target=ast.Name(id=bound)):
                if bound == path.name:
                    return True
            case ast.Assign(targets=targets):
                if any(isinstance(one, ast.Name) and one.id == path.name for one in targets):
                    return True
            case _:
                pass
    return False


def test_every_word_of_the_glossary_is_in_the_code() -> None:
    """Each module or class that a row names exists; words are there once, sorted within their table."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [row for row in ROWS.findall(text) if row[0] not in {"word", "---"}]
    assert len(rows) == len([line for line in text.splitlines() if line.startswith("| ")]) - text.count("| word |")
    assert [(word, where) for word, _, where in rows if where and not _defined(where)] == []
    words = [word for word, _, _ in rows]
    assert len(words) == len(set(words)) > 60


def test_a_class_name_means_one_thing() -> None:
    """No two classes of the house have one name, but for those that are one thing in two places."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in TWICE} == {}


TWICE = {
    "Published": "the core's protocol, and the event of the trace",
}
"""Names that more than one class may have, each with the reason."""
