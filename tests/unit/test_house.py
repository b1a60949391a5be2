"""What may import what: the rooms of `kvpipe` know no engine, tests share the test kit. How long things may be."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kvpipe

HOUSE = Path(kvpipe.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpipe", "statemachine", "connectors", "tests", "property_tests", "benchmarks", "tools")
FUNCTION_LINES_MAX, FILE_LINES_MAX, LONG_FILE_LINES_MAX = 70, 400, 600
LONG_FILES = {
    "kvpipe/cache/catalog.py",
    "kvpipe/cache/policy/sessions.py",
    "connectors/vllm/connector.py",
    "connectors/vllm/trial/rank.py",
    "connectors/vllm/trial/shapes.py",
    "kvpipe/scheduler/fetches.py",
    "kvpipe/scheduler/side.py",
    "kvpipe/testing/models.py",
    "kvpipe/testing/tier_conformance.py",
    "kvpipe/transfer/cuda.py",
    "kvpipe/worker/pipeline.py",
    "tests/cache/test_sessions.py",
    "tests/scheduler/test_adapters.py",
    "tests/scheduler/test_side.py",
    "tests/tiers/test_s3.py",
    "tests/trace/test_recorder.py",
    "tests/transfer/test_cuda.py",
    "tests/transfer/test_layouts.py",
}
"""Files of more than `FILE_LINES_MAX` lines. Names leave this list, and none comes."""
ENGINE = ("vllm", "kvpipe.connectors")


def _modules() -> dict[str, ast.Module]:
    """Return all of the house by name, also what is linked into it: `connectors`, `statemachine`."""
    found = {}
    for folder, _, files in os.walk(HOUSE, followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(HOUSE).with_suffix("").parts
            name = ".".join(("kvpipe", *parts)).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = _modules()


def _imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yield the modules that import statements name; each name of a `from` too, which may be a module itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported: not functions, nor what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _at_import(child)


def test_the_house_knows_no_engine() -> None:
    """No module but the connector's imports vLLM or its connector, not even for types or when called."""
    known = [
        name
        for name, tree in MODULES.items()
        if not name.startswith("kvpipe.connectors")
        and any(one == engine or one.startswith(f"{engine}.") for one in _imports(ast.walk(tree)) for engine in ENGINE)
    ]
    assert known == []


def test_imports_have_no_cycles() -> None:
    """What runs when a module is imported can be put in an order."""
    graph = {
        name: {one for one in _imports(_at_import(tree)) if one in MODULES and one != name}
        for name, tree in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def _files() -> Iterator[tuple[str, str]]:
    """Yield name and text of every Python file of the repository. A link's are those of where it leads."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


FILES = dict(_files())


def test_functions_fit_on_a_screen() -> None:
    """Those of tests, too."""
    long = [
        f"{name}: {node.name}"
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_files_are_about_one_thing() -> None:
    """None is too long, few are long, and these are known by name."""
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert [name for name, count in lines.items() if count > LONG_FILE_LINES_MAX] == []
    assert {name for name, count in lines.items() if count > FILE_LINES_MAX} == LONG_FILES


def test_tests_share_the_test_kit() -> None:
    """What two rooms of tests need is in `kvpipe.testing` or in the engine's trial: no room imports another."""
    crossing = [
        f"{name}: {module}"
        for name, text in FILES.items()
        for module in _imports(ast.walk(ast.parse(text)))
        if module.startswith("tests.") and module.split(".")[1] not in name.split("/")[:2]
    ]
    assert crossing == []
