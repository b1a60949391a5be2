"""`SHARED` lists each attribute that the loop of a tier's thread shares with the thread's owner."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import kvpipe
from kvpipe.tiers import SHARED
from tests.rigs.written_attributes import written

HOUSE = Path(kvpipe.__file__).parent
OWNERS = (
    *sorted((HOUSE / "scheduler").glob("*.py")),
    *sorted((HOUSE / "features").glob("*.py")),
    HOUSE / "worker" / "side.py",
    *sorted((HOUSE / "manage").glob("*.py")),
)
"""Files whose code uses a finder, a carrier or a lookup on a thread other than the thread of its loop."""
HANDED = frozenset({"_take", "_begin_survey"})
"""Methods that are not coroutines, but run on the loop as callbacks."""

Method = ast.FunctionDef | ast.AsyncFunctionDef


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _classes() -> dict[str, dict[str, Method]]:
    """Return the methods of `TierThread`, of its two subclasses, of lookups and of guards."""
    trees = [_tree(HOUSE / "tiers" / f"{file}.py") for file in ("thread", "finder", "carrier", "guard")]
    return {
        node.name: {one.name: one for one in node.body if isinstance(one, Method)}
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


CLASSES = _classes()


def _written(node: ast.AST) -> set[str]:
    """Return the attributes that a statement assigns, or whose content the statement changes.

    Firing an event changes `state`.
    """
    fires = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fire"
    return {"state"} if fires else {one.attr for one in written(node)}


def _touched(methods: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the attributes that the methods write, and all attributes that they use.

    A call of `allows` reads `state`.
    """
    writes, named = set[str](), set[str]()
    for method in methods:
        for node in ast.walk(method):
            named |= {node.attr} if isinstance(node, ast.Attribute) else set()
            writes |= _written(node)
    return writes, named | ({"state"} if "allows" in named else set())


def _reached(kind: str, roots: set[str], others: Collection[str] = ()) -> dict[str, Method]:
    """Return the methods that `roots` call on one thread, except `others`, which another thread calls."""
    methods = CLASSES["TierThread"] | CLASSES[kind]
    out, todo = dict[str, Method](), set(roots)
    while todo:
        name = todo.pop()
        out[name] = methods[name]
        todo |= (_touched([methods[name]])[1] & methods.keys()) - out.keys() - set(others)
    return out


def _roots(kind: str) -> tuple[set[str], set[str]]:
    """Return the methods with which a loop's thread begins, and the methods with which other threads begin.

    The loop begins with coroutines and callbacks, other threads begin with public methods.
    """
    methods = CLASSES["TierThread"] | CLASSES[kind]
    loop = {name for name, one in methods.items() if isinstance(one, ast.AsyncFunctionDef) or name in HANDED}
    return loop, {name for name in methods if not name.startswith("_")} - loop


def _outside() -> Iterator[ast.AST]:
    """Yield each access of an owner to its finder, carrier or lookup, as a statement or an attribute."""
    for file in OWNERS:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in {
                "finder",
                "carrier",
                "lookup",
            }:
                yield node
            if isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Attribute) and ast.unparse(one.value).endswith("finder") for one in node.targets
            ):
                yield node


def _fields() -> set[str]:
    """Return the attributes that are created with a thread, a lookup or a breaker."""
    made = {
        name
        for kind in ("TierThread", "Finder", "Carrier", "TierLookup", "Breaker")
        for node in ast.walk(CLASSES[kind]["__init__"])
        if not isinstance(node, ast.Call)
        for name in _written(node)
    }
    return made | {"state"}


def test_every_method_has_its_threads() -> None:
    """For each method, the call graph shows which threads run it: the loop's thread, the owner's thread, or both."""
    for kind in ("Finder", "Carrier"):
        loop, owner = _roots(kind)
        reached = _reached(kind, loop).keys() | _reached(kind, owner, loop).keys() | {"__init__"}
        assert reached == CLASSES["TierThread"].keys() | CLASSES[kind].keys()


def test_every_attribute_that_a_loop_shares_is_listed() -> None:
    """`SHARED` lists each attribute that the loop writes and another thread uses, or the reverse."""
    shared = set[str]()
    outside = _touched(_outside())
    guards = _touched(one for name, one in (CLASSES["GuardedTier"] | CLASSES["Breaker"]).items() if name != "__init__")
    # a guard's own methods are no attributes that threads share
    guards = guards[0], guards[1] - CLASSES["GuardedTier"].keys()
    for kind in ("Finder", "Carrier"):
        begun_on_loop, public = _roots(kind)
        loop = _touched(_reached(kind, begun_on_loop).values())
        loop = loop[0] | guards[0], loop[1] | guards[1]
        owner = _touched(_reached(kind, public, begun_on_loop).values())
        owner = owner[0] | outside[0], owner[1] | outside[1]
        shared |= (loop[0] & owner[1]) | (owner[0] & loop[1])
    assert shared & _fields() == set(SHARED)
    assert all(len(why) > 20 for why in SHARED.values())
