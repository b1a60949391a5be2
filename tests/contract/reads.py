"""Finds the attributes that the connector reads of vLLM's objects, as far as annotations show an object's class.

This module is a reader, not a type checker. The class of an object follows from the object's annotation, from the
attribute of vLLM with that value, or from the object's name (`BY_NAME`). A container of objects (a list, a dict, an
option) counts as the object.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tests.contract.relied import RELIED
from tests.contract.sources import Read

FILES: Final = {name: path for path, classes in RELIED.items() for name in classes}
"""The file of each class that records contain."""
BY_NAME: Final = {
    "config": "VllmConfig",
    "vllm_config": "VllmConfig",
    "_vllm_config": "VllmConfig",
    "_kv_transfer_config": "KVTransferConfig",
    "_kv_cache_config": "KVCacheConfig",
    "request": "Request",
    "coordinator": "KVCacheCoordinator",
    "single_type_managers": "SingleTypeKVCacheManager",
    "block_pool": "BlockPool",
}
"""The classes of objects that have no annotation where they are made, by name."""
_SAME: Final = frozenset({"enumerate", "iter", "list", "next", "reversed", "set", "sorted", "tuple"})
_HOLDERS: Final = frozenset({*dir(dict), *dir(list), *dir(set), *dir(tuple)})


class AttributeRead(NamedTuple):
    """A line of code that reads an attribute of one of vLLM's classes."""

    cls: str
    name: str
    line: int


class Reader:
    """Reads sources of the connector. `read` returns vLLM's sources."""

    def __init__(self, read: Read) -> None:
        """Start without results."""
        self._read = read
        self._kinds: dict[str, Mapping[str, str]] = {}

    def seen(self, source: str) -> list[AttributeRead]:
        """Return the attributes that a module reads."""
        out: list[AttributeRead] = []
        for top in ast.parse(source).body:
            own = _own(top)
            for function in (one for one in ast.walk(top) if isinstance(one, ast.FunctionDef | ast.Lambda)):
                out += self._of(function, own)
        return sorted(set(out))

    def _of(self, function: ast.FunctionDef | ast.Lambda, own: Mapping[str, str]) -> Iterator[AttributeRead]:
        known = dict(own)
        for arg in (*function.args.args, *function.args.kwonlyargs):
            kind = _class_in(arg.annotation) if arg.annotation is not None else BY_NAME.get(arg.arg, "")
            known[arg.arg] = kind
        nodes = list(ast.walk(function))
        for _ in range(2):  # in a comprehension, the use of a name comes before its binding, so two rounds are needed
            for node in nodes:
                for target, value in _bound(node):
                    if kind := self._kind(value, known):
                        known[ast.unparse(target)] = kind
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of, name = self._kind(node.value, known), node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                of, name = self._kind(node.args[0], known), str(getattr(node.args[1], "value", ""))
            else:
                continue
            if of and name and (name not in _HOLDERS or name in self._of_class(of)):
                yield AttributeRead(of, name, node.lineno)

    def _kind(self, node: ast.expr, known: Mapping[str, str]) -> str:
        """Return the vLLM class of an object, or of the objects in a container.

        "" means that the class is not known.
        """
        if (text := ast.unparse(node)) in known:
            return known[text]
        if isinstance(node, ast.Attribute):
            of = self._kind(node.value, known)
            if of and node.attr in _HOLDERS:
                return of
            return (self._of_class(of).get(node.attr) if of else "") or BY_NAME.get(node.attr, "")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                return self._kind(node.func, known)
            return self._kind(node.args[0], known) if ast.unparse(node.func) in _SAME and node.args else ""
        return self._kind(node.value, known) if isinstance(node, ast.Subscript) else ""

    def _of_class(self, name: str) -> Mapping[str, str]:
        """Return the annotated class of each attribute of one of vLLM's classes."""
        if name not in self._kinds:
            self._kinds[name] = {}
            tree = ast.parse(self._read(FILES[name])) if name in FILES else ast.Module([], [])
            found = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
            self._kinds[name] = dict(_annotated(found[0])) if found else {}
        return self._kinds[name]


def _own(top: ast.stmt) -> dict[str, str]:
    """Return, by ``self.name``, the classes of the attributes of one of kvpipe's own classes."""
    found = {f"self.{name}": kind for name, kind in _annotated(top)} if isinstance(top, ast.ClassDef) else {}
    for node in ast.walk(top):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            kinds = {arg.arg: _class_in(arg.annotation) for arg in (*node.args.args, *node.args.kwonlyargs)}
            found |= {ast.unparse(t): kinds.get(ast.unparse(v), "") for one in ast.walk(node) for t, v in _bound(one)}
    return {name: kind for name, kind in found.items() if name.startswith("self.") and kind}


def _annotated(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).removeprefix("self."), _class_in(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.name, _class_in(node.returns)


def _class_in(annotation: ast.expr | None) -> str:
    names = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
    return next((name for name in names if name in FILES), "")


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each name that a statement or a comprehension binds, with its value."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.For | ast.comprehension):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.NamedExpr):
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        if not isinstance(target, ast.Tuple):
            yield target, value
        elif isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "zip":
            yield from zip(target.elts, value.args, strict=False)
        else:  # the names are bound to results of `items()` or `enumerate()`
            yield target.elts[-1], value
