"""Each public name in `docs/api.md` exists, is annotated and documented. Extensions need no other names."""

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
    """Yield the public functions that a class of kvpipe defines.

    For a generated class, yield the functions from which it is generated.
    """
    for base in owner.__mro__:
        for name, one in vars(base).items() if base.__module__.startswith("kvpipe.") else ():
            function = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)))
            if inspect.isfunction(function) and function.__module__ == base.__module__ and not name.startswith("_"):
                yield function


def unannotated(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function that have no annotation, and "return" if the result has none."""
    signature = inspect.signature(function)
    out = [name for name, one in signature.parameters.items() if one.annotation is one.empty]
    missing = ["return"] if signature.return_annotation is signature.empty else []
    return [name for name in out if name not in {"self", "cls"}] + missing


def targets(node: ast.stmt) -> list[str]:
    """Return the names to which a statement assigns."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return []


def sources(module: str) -> list[str]:
    """Return the text of a module, or of all modules of a package."""
    file = Path(import_module(module).__file__ or "")
    files = sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]
    return [one.read_text(encoding="utf-8") for one in files]


@each
def test_public_name_can_be_imported(module: str, name: str) -> None:
    """A public name can be imported. Classes, functions and methods have docstrings and annotations."""
    one = getattr(import_module(module), name)
    if inspect.isfunction(one):
        assert one.__doc__
        assert not unannotated(one)
    elif inspect.isclass(one):
        assert one.__doc__
        assert one.__module__.startswith(module)  # one of the package's modules may define the name
        for method in methods(one):
            assert method.__doc__, method.__qualname__
            assert not unannotated(method), method.__qualname__


@each
def test_a_public_value_is_documented(module: str, name: str) -> None:
    """A public value that is neither class nor function has a comment or a docstring where it is defined."""
    one = getattr(import_module(module), name)
    if inspect.isfunction(one) or inspect.isclass(one) or name == "__version__":
        return
    source, written = next(
        (source, node) for source in sources(module) for node in ast.parse(source).body if name in targets(node)
    )
    behind = source.splitlines()[(written.end_lineno or 0) :]
    assert "  # " in (ast.get_source_segment(source, written) or "") or behind[0].startswith('"""')


def test_all_of_a_suite_has_exactly_the_listed_names() -> None:
    """The `__all__` of a suite's module has exactly the names that the page lists for it."""
    for module, names in ROWS.items():
        listed = getattr(import_module(module), "__all__", names)
        assert sorted(names) == sorted(listed), module


def test_examples_import_public_names_only() -> None:
    """The tier package, the page on extending and the second engine import only public names of kvpipe.

    Each protocol that the page names is public, too.
    """
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "kvpipe" / "cli" / "tier_package").glob("*.py")]
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
