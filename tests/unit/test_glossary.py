"""Each word has one meaning: the code has the glossary's words, and each name of a class is used once."""

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
    """Whether the dotted `name` is a module, a package, or a name that a module defines at its top level."""
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
    """The module or class that a row names exists. Every word occurs once, and each table is sorted by its words."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [row for row in ROWS.findall(text) if row[0] not in {"word", "---"}]
    assert len(rows) == len([line for line in text.splitlines() if line.startswith("| ")]) - text.count("| word |")
    assert [(word, where) for word, _, where in rows if where and not _defined(where)] == []
    words = [word for word, _, _ in rows]
    assert len(words) == len(set(words)) > 60


def _types(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes, and of its type aliases that do not begin with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for one in tree.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name) and ALIAS.match(target.id))


ALIAS = re.compile(r"[A-Z][A-Za-z]*[a-z]")


def test_a_name_of_a_type_means_one_thing() -> None:
    """No two classes or type aliases have the same name."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in _files():
        for name in _types(ast.parse(file.read_text(encoding="utf-8"))):
            places[name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


SHARED_FUNCTIONS = {
    "add_arguments": "each adds the arguments of one command",
    "add_parsers": "each adds the subcommands of one command",
    "add_words": "the kernel's function does the same as the digest's, on a GPU",
    "main": "the entry point of a program",
    "run": "each runs one command; a tier's tests import `run` from the public test kit",
}
"""Names of functions that several modules may define, with the reason."""


def test_a_public_function_of_a_module_has_its_own_name() -> None:
    """No two modules define a public function of the same name, except for the names in SHARED_FUNCTIONS."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in _files():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SHARED_FUNCTIONS} == {}
    assert sorted(SHARED_FUNCTIONS.keys() - shared) == []
