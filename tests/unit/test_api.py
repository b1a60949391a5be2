"""What `docs/api.md` calls public is there, annotated and documented; and nobody needs more to extend kvpipe."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NEW_ENGINE = (ROOT / "docs" / "new-engine.md").read_text(encoding="utf-8")
ROWS = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)}
NAMES = [(module, name) for module, names in ROWS.items() for name in names]
each = pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])


def methods(owner: type) -> Iterator[Callable[..., Any]]:
    """Yield the functions that a class of ours defines and does not hide; of one that is made, those it is made of."""
    for base in owner.__mro__:
        for name, one in vars(base).items() if base.__module__.startswith("kvpipe.") else ():
            function = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)))
            if inspect.isfunction(function) and function.__module__ == base.__module__ and not name.startswith("_"):
                yield function


def unannotated(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function that have no annotation, and "return"."""
    signature = inspect.signature(function)
    out = [name for name, one in signature.parameters.items() if one.annotation is one.empty]
    missing = ["return"] if signature.return_annotation is signature.empty else []
    return [name for name in out if name not in {"self", "cls"}] + missing


def targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement gives a value."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return []


@each
def test_a_public_name_is_there(module: str, name: str) -> None:
    """It can be imported; a class and a function have docstrings, and so does every method; all are annotated."""
    one = getattr(import_module(module), name)
    if inspect.isfunction(one):
        assert one.__doc__
        assert not unannotated(one)
    elif inspect.isclass(one):
        assert one.__doc__
        assert one.__module__ == module
        for method in methods(one):
            assert method.__doc__, method.__qualname__
            assert not unannotated(method), method.__qualname__


@each
def test_a_public_value_is_documented(module: str, name: str) -> None:
    """What is no class and no function has a line on what it is behind it, or a comment, where it is written."""
    one = getattr(import_module(module), name)
    if inspect.isfunction(one) or inspect.isclass(one) or name == "__version__":
        return
    source = Path(import_module(module).__file__ or "").read_text(encoding="utf-8")
    written = next(node for node in ast.parse(source).body if name in targets(node))
    behind = source.splitlines()[(written.end_lineno or 0) :]
    assert "  # " in (ast.get_source_segment(source, written) or "") or behind[0].startswith('"""')


def test_the_suites_show_what_they_export() -> None:
    """A module with `__all__` has the very names of the page in it."""
    for module, names in ROWS.items():
        listed = getattr(import_module(module), "__all__", names)
        assert sorted(names) == sorted(listed), module


def test_nobody_needs_more() -> None:
    """What the package of the tests, the page on extending and the second engine's adapter import of kvpipe is public.

    So is what the page calls a protocol.
    """
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "third_party_tier").glob("*.py")]
    engine = ROOT / "tests" / "second_engine"
    texts += [(engine / name).read_text(encoding="utf-8") for name in ("adapter.py", "test_conformance.py")]
    texts += re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    found = [
        match for text in texts for match in re.findall(r"^from (kvpipe(?:\.[\w.]+)?) import (.*)$", text, re.MULTILINE)
    ]
    wanted = {(module, name.strip()) for module, names in found for name in names.split(",")}
    assert len(wanted) > 30
    assert wanted <= set(NAMES)
    assert set(re.findall(r"`(\w+Policy)`", page)) < {name for _, name in NAMES}
    assert set(re.findall(r"<!-- ([A-Z]\w+):begin -->\n\|", NEW_ENGINE)) < {name for _, name in NAMES}
