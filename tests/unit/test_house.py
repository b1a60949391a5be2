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
    "connectors/vllm/connector.py": "one class, most of whose methods are vLLM's interface",
    "connectors/vllm/trial/rank.py": "a fake of one class of vLLM's: the runner of a rank",
    "connectors/vllm/trial/shapes.py": "a table of engines",
    "kvpipe/cache/catalog.py": "slots, keys and leases: what one of them does changes the others, chunk by chunk",
    "kvpipe/cache/policy/sessions.py": "one policy, called for every chunk: its parts share what they know of a chain",
    "kvpipe/scheduler/fetches.py": "stages, their transfers and what is in flight: what ends one goes on with another",
    "kvpipe/scheduler/side.py": "what an engine calls; the rest makes its parts",
    "kvpipe/testing/models.py": "a table of tiny models",
    "kvpipe/testing/tier_conformance.py": "one suite: a claim per method, which a subclass inherits",
    "kvpipe/transfer/cuda.py": "one engine: what its threads share is in one place",
    "tests/cache/test_sessions.py": "one policy",
    "tests/scheduler/test_adapters.py": "one machine of claims, over many ways to break it",
    "tests/scheduler/test_side.py": "what an engine calls",
    "tests/tiers/test_s3.py": "one tier",
    "tests/trace/test_recorder.py": "one recorder, its sinks and its files",
    "tests/transfer/test_cuda.py": "one engine",
    "tests/transfer/test_layouts.py": "a table of layouts",
}
"""Why files have more than `FILE_LINES_MAX` lines. Names leave this list, and none comes."""
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
    """None is too long; few are long, each for a reason."""
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert [name for name, count in lines.items() if count > LONG_FILE_LINES_MAX] == []
    assert {name for name, count in lines.items() if count > FILE_LINES_MAX} == set(LONG_FILES)


def test_tests_share_the_test_kit() -> None:
    """What two rooms of tests need is in `kvpipe.testing` or in the engine's trial: no room imports another."""
    crossing = [
        f"{name}: {module}"
        for name, text in FILES.items()
        for module in _imports(ast.walk(ast.parse(text)))
        if module.startswith("tests.") and module.split(".")[1] not in name.split("/")[:2]
    ]
    assert crossing == []
