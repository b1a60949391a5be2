"""Finds the attributes that a statement writes, for tests of the `SHARED` lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

_MUTATORS: Final = frozenset({"add", "append", "clear", "discard", "extend", "pop", "popleft", "remove", "update"})


def written(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns, and the attributes whose content the statement changes."""
    match node:
        case ast.Assign(targets=targets):
            todo = list(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            todo = [target]
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if name in _MUTATORS:
            todo = [changed]
        case _:
            return
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Tuple):
            todo += one.elts
        elif isinstance(one, ast.Subscript):
            todo.append(one.value)
        elif isinstance(one, ast.Attribute):
            yield one
