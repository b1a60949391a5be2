"""The changes of kvpipe's source that cosmic-ray proposes, for `propose_mutants.py`."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


class Proposal(NamedTuple):
    """A change that cosmic-ray makes in a file.

    The change is made at place number `occurrence` of all places that `operator` can change.
    """

    file: str
    line: int
    operator: str
    occurrence: int


def proposals(root: Path, folder: str, sample: int, seed: int) -> Iterator[tuple[Proposal, str]]:
    """Yield `sample` proposals for `folder` with the mutated source.

    First a place is drawn, then a change of this place. So a place that many operators can change is not drawn more
    often than other places. Changes of annotations alone are left out.
    """
    random_ = random.Random(seed)  # noqa: S311  (a sample)
    places: defaultdict[tuple[str, tuple[int, int]], list[Proposal]] = defaultdict(list)
    for file in sorted((root / folder).rglob("*.py")):
        name, nodes = file.relative_to(root).as_posix(), [*ast_nodes(get_ast(file.read_text("utf-8")))]
        for operator in operator_names():
            kind = get_operator(operator)
            if kind.arguments():
                continue
            made = (start for node in nodes for start, _ in kind().mutation_positions(node))
            for occurrence, start in enumerate(made):
                places[name, start].append(Proposal(name, start[0], operator, occurrence))
    order = sorted(places)
    random_.shuffle(order)
    for place in order:
        if not sample:
            return
        one = random_.choice(places[place])
        source = (root / one.file).read_text("utf-8")
        changed = mutate_code(source, get_operator(one.operator)(), one.occurrence)
        if changed and _meaning(changed) not in {"", _meaning(source)}:
            sample -= 1
            yield one, changed


class _Unannotated(ast.NodeTransformer):
    """Removes annotations from a tree."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("annotation", "returns"):
            if isinstance(getattr(node, field, None), ast.expr):
                setattr(node, field, ast.Constant(None))
        return super().generic_visit(node)


def _meaning(source: str) -> str:
    """Return the tree of `source` without annotations, as text. Returns "" if `source` is not Python."""
    try:
        return ast.dump(_Unannotated().visit(ast.parse(source)))
    except SyntaxError:
        return ""


class _Bodies(_Unannotated):
    """Takes the bodies of functions out of a tree, and collects the bodies."""

    def __init__(self, source: str) -> None:
        self.bodies: dict[int, str] = {}
        self.rest = ast.dump(self.visit(ast.parse(source)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        line = min(node.lineno, *(one.lineno for one in node.decorator_list)) if node.decorator_list else node.lineno
        self.bodies[line] = "".join(map(ast.dump, node.body))
        node.body = [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815


def changed_functions(source: str, changed: str) -> frozenset[int] | None:
    """Return the first lines of the functions that differ. Returns None if anything outside of functions differs."""
    old, new = _Bodies(source), _Bodies(changed)
    if old.rest != new.rest or old.bodies.keys() != new.bodies.keys():
        return None
    return frozenset(line for line, body in old.bodies.items() if body != new.bodies[line])
