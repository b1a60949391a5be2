"""Each attribute that two threads share is listed in `SHARED`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvpipe.worker
from kvpipe.transfer.base import Ticket
from kvpipe.worker import SHARED
from kvpipe.worker.batch import Batch
from tests.rigs.written_attributes import written

ROOM = Path(kvpipe.worker.__file__).parent
STEP_THREAD, LOOP_THREAD = ("pipeline", "side", "limits", "outcomes", "async_loads"), ("copies", "watchdog")
HANDED = {"put": STEP_THREAD, "settled": LOOP_THREAD}
"""Methods that run on another thread than the other methods of their file, with the files of that thread."""


def _methods(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse((ROOM / f"{file}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            yield node


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns, or whose content it changes.

    The trace is left out, because it is thread-safe.
    """
    return (one for one in written(node) if ast.unparse(one.value) != "self.trace")


def _touched(files: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Return the attributes that a thread's methods write, and the attributes that these methods name."""
    writes, named = set[str](), set[str]()
    for method in (m for file in (*files, "batch", *STEP_THREAD, *LOOP_THREAD) for m in _methods(file)
                   if (HANDED.get(m.name) == files if m.name in HANDED else file in files)):  # fmt: skip
        for node in ast.walk(method):
            named |= {node.attr} if isinstance(node, ast.Attribute) else set()
            writes |= {one.attr for one in _targets(node)}
    return writes, named


def _fields() -> set[str]:
    """Return the attributes of the objects that both threads use: batches, tickets, and objects of the loop thread."""
    made = {
        one.attr
        for file in ("copies", "watchdog")
        for node in ast.walk(ast.parse((ROOM / f"{file}.py").read_text(encoding="utf-8")))
        for one in _targets(node)
    }
    return made | set(Batch.__slots__) | set(Ticket.__slots__)


def test_every_attribute_that_two_threads_share_is_listed() -> None:
    """If one thread writes an attribute and the other thread uses it, `SHARED` has the reason why this is safe."""
    steps, loop = _touched(STEP_THREAD), _touched(LOOP_THREAD)
    shared = ((steps[0] & loop[1]) | (loop[0] & steps[1])) & _fields()
    assert shared == set(SHARED)
    assert all(len(why) > 20 for why in SHARED.values())


def test_worker_imports_no_engine() -> None:
    """The package imports neither vLLM nor its connector, not even in a function."""
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("vllm", "kvpipe.connectors"))], file.name
