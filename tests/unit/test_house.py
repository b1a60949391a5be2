"""Modules of `kvpipe` import no engine, tests share the test kit, and files and functions have a maximum length."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kvpipe

HOUSE = Path(kvpipe.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpipe", "statemachine", "connectors", "tests", "property_tests", "benchmarks", "tools")
FUNCTION_LINES_MAX, FILE_LINES_MAX, LONG_FILE_LINES_MAX = 70, 400, 600
LONG_FILES = {
    "connectors/vllm/trial/invariants.py": "a table of invariants",
    "connectors/vllm/trial/rank.py": "a fake of one class: vLLM's model runner of a rank",
    "connectors/vllm/trial/shapes.py": "a table of engines",
    "kvpipe/cache/catalog.py": "slots, keys and leases: a change of one also changes the others",
    "kvpipe/config/settings.py": "a table of keys",
    "kvpipe/cache/policy/sessions.py": "one policy, called for every chunk: its parts share the data of chains",
    "kvpipe/scheduler/fetches.py": "stages and their transfers: the end of one transfer begins the next",
    "kvpipe/scheduler/side.py": "the calls of an engine, and the creation of all parts",
    "kvpipe/tiers/s3/child.py": "one program, started by its path: it imports nothing of kvpipe",
    "connectors/vllm/tiny/models.py": "a table of tiny models",
    "kvpipe/transfer/cuda.py": "one engine: the data that its threads share are in one place",
    "kvpipe/worker/side.py": "the calls of a runner, and the creation of all parts of a rank",
    "kvpipe/worker/pipeline.py": "vLLM's calls of a step, in their order, over one cursor",
    "tests/cache/test_sessions.py": "one policy",
    "tests/scheduler/test_adapters.py": "one state machine, with many ways to break it",
    "tests/scheduler/test_side.py": "the calls of an engine",
    "tests/tiers/test_disk_index.py": "one index",
    "tests/tiers/test_s3.py": "one tier",
    "tests/trace/test_recorder.py": "one recorder, its sinks and its files",
    "tests/transfer/test_cuda.py": "one engine",
    "tests/transfer/test_layouts.py": "a table of layouts",
}
"""The reasons why these files have more than `FILE_LINES_MAX` lines. None of these files can be divided well."""
ENGINE = ("vllm", "kvpipe.connectors")


@cache
def _modules() -> dict[str, ast.Module]:
    """Return all modules of the repository by their names.

    The linked folders `connectors` and `statemachine` are included.
    """
    found = {}
    for folder, _, files in os.walk(HOUSE, followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(HOUSE).with_suffix("").parts
            name = ".".join(("kvpipe", *parts)).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yield the modules in import statements, and the names that `from` imports, because a name may be a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported.

    Bodies of functions, and imports for type checkers only, do not run then.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _at_import(child)


def test_the_core_imports_no_engine() -> None:
    """Only the connector imports vLLM.

    No other module imports vLLM or the connector, not even for types or inside functions.
    """
    known = [
        name
        for name, tree in _modules().items()
        if not name.startswith("kvpipe.connectors")
        and any(one == engine or one.startswith(f"{engine}.") for one in _imports(ast.walk(tree)) for engine in ENGINE)
    ]
    assert known == []


def test_imports_have_no_cycles() -> None:
    """Imports at module load form no cycle."""
    graph = {
        name: {one for one in _imports(_at_import(tree)) if one in _modules() and one != name}
        for name, tree in _modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def _rooms() -> list[str]:
    """Return the rows of the map in `docs/architecture.md`. Each row is the beginning of the names of its modules."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^([\w/.]+) +\S", text.split("rooms:begin")[1].split("rooms:end")[0], re.MULTILINE)
    names = [row.removesuffix(".py").rstrip("/").replace("/", ".") for row in rows]
    return [name if name.startswith("kvpipe.") else f"kvpipe.{name}" for name in names]


ROOMS = _rooms()


def _room(module: str) -> int:
    """Return the number of a module's row, which is the row with the longest beginning that matches.

    The number is -1 if every module may import this module.
    """
    rooms = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return ROOMS.index(max(rooms, key=len)) if rooms else -1


def test_modules_import_only_earlier_rows_of_the_map() -> None:
    """A module does not import a module of a later row of the map, not even for types or inside functions."""
    assert [name for name in _modules() if _room(name) < 0] == ["kvpipe", "kvpipe.__main__"]
    downwards = [
        f"{name} -> {module}"
        for name, tree in _modules().items()
        if name != "kvpipe.__main__"
        for module in _imports(ast.walk(tree))
        if module in _modules() and not name.startswith(f"{module}.") and _room(module) > _room(name)
    ]
    assert downwards == []


def test_few_files_import_each_other() -> None:
    """Imports for types and in functions form no cycle, except one per tier: the tier's settings make its client."""
    graph = {
        name: {one for one in _imports(ast.walk(tree)) if one in _modules() and one != name}
        for name, tree in _modules().items()
    }
    bits = {name: 1 << place for place, name in enumerate(graph)}
    reached = {name: sum(bits[one] for one in known) for name, known in graph.items()}
    for middle, bit in bits.items():
        for name, known in reached.items():
            if known & bit:
                reached[name] |= reached[middle]
    cyclic = {name.rpartition(".")[0] for name, bit in bits.items() if reached[name] & bit}
    assert cyclic == {f"kvpipe.tiers.{tier}" for tier in ("disk", "mooncake", "redis", "s3")}


def _files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every Python file of the repository.

    A linked file has the name of the link's target.
    """
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


FILES = dict(_files())


@cache
def _trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each of `FILES`."""
    return {name: ast.parse(text) for name, text in FILES.items()}


def test_functions_fit_on_a_screen() -> None:
    """No function is too long. This also holds for tests."""
    long = [
        f"{name}: {node.name}"
        for name, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_files_have_a_limited_length() -> None:
    """No file is too long. The list has the longer files with a reason."""
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert [name for name, count in lines.items() if count > LONG_FILE_LINES_MAX] == []
    assert {name for name, count in lines.items() if count > FILE_LINES_MAX} == set(LONG_FILES)


def test_tests_share_the_test_kit() -> None:
    """No folder of tests imports another folder of tests.

    Code that folders share is in `tests/rigs`, `kvpipe.testing` or the trial. `tests/progress.py` is a plugin of
    pytest.
    """
    crossing = [
        f"{name}: {module}"
        for name, tree in _trees().items()
        for module in _imports(ast.walk(tree))
        if module.startswith("tests.") and module.split(".")[1] not in {"rigs", "progress", *name.split("/")[:2]}
    ]
    assert crossing == []
