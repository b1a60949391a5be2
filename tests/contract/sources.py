"""vLLM's connector contract as data: read from vLLM's sources by `ast`, and kept as JSON in `records/`.

Nothing here imports vLLM, so a release can be recorded without being installed. A record has the parts that kvpipe
inherits, overrides and reads: signatures of base classes, fields of dataclasses, and attributes of classes.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.relied import FIELDS, RELIED, SIGNATURES

Read = Callable[[str], str]
"""A function that returns the source text of a path such as ``vllm/v1/request.py``."""

RECORDS = Path(__file__).parent / "records"


class Method(NamedTuple):
    """One method of a class: `kind` is method, classmethod, staticmethod or property."""

    kind: str
    signature: inspect.Signature
    abstract: bool = False


# ---- recording -------------------------------------------------------------------------------------------------------


def record(version: str, read: Read) -> dict[str, Any]:
    """Record the contract of the release whose files `read` returns. A missing file is recorded as empty."""

    def parse(path: str) -> ast.Module:
        try:
            return ast.parse(read(path))
        except (OSError, KeyError):
            return ast.Module(body=[], type_ignores=[])

    trees = {path: parse(path) for path in sorted({*SIGNATURES, *FIELDS, *RELIED})}
    return {
        "version": version,
        "methods": {name: _methods(_class(trees[p], name)) for p, names in SIGNATURES.items() for name in names},
        "fields": {name: _fields(_class(trees[p], name)) for p, names in FIELDS.items() for name in names},
        "attributes": {
            path: {
                name: ", ".join(sorted(set(wanted) & _attributes(trees[path], name)))
                for name, wanted in classes.items()
                if _class(trees[path], name) is not None
            }
            for path, classes in RELIED.items()
        },
    }


def dump(contract: dict[str, Any]) -> str:
    """Return the record's text: sorted, with one method, class or list of fields per line."""
    return json.dumps(contract, indent=1, sort_keys=True) + "\n"


def load(version: str, folder: Path = RECORDS) -> dict[str, Any]:
    """Return the record of `version`, a full version such as 0.33.0."""
    contract: dict[str, Any] = json.loads((folder / f"vllm-{version}.json").read_text(encoding="utf-8"))
    return contract


def recorded(folder: Path = RECORDS) -> list[str]:
    """Return the versions that have a record."""
    found = [p.name.removeprefix("vllm-").removesuffix(".json") for p in folder.glob("vllm-*.json")]
    return sorted(found, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])


def folder_reader(root: Path) -> tuple[str, Read]:
    """Return (version, reader) for the package ``vllm`` in a folder, or for a folder that is this package."""
    root = root.parent if root.name == "vllm" and (root / "__init__.py").is_file() else root

    def read(path: str) -> str:
        return (root / path).read_text(encoding="utf-8")

    return package_version(read("vllm/_version.py")), read


def package_version(source: str) -> str:
    """Return the release that `vllm/_version.py` names, without its local part."""
    match = re.search(r"""^(?:__version__ = )?version = ['"](\d+\.\d+[^'"+]*)""", source, re.MULTILINE)
    if match is None:
        msg = "vllm/_version.py names no version"
        raise ValueError(msg)
    return match[1]


def class_methods(source: str, name: str) -> dict[str, Method]:
    """Return the methods that class `name` in `source` defines itself."""
    return parse_methods(_methods(_class(ast.parse(source), name)))


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def _functions(cls: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in cls.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _methods(cls: ast.ClassDef | None) -> dict[str, str]:
    return {f.name: _method(f) for f in _functions(cls)} if cls is not None else {}


def _method(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = {ast.unparse(d).rpartition(".")[2] for d in function.decorator_list}
    kind = next((k for k in ("classmethod", "staticmethod", "property") if k in marks), "method")
    if "cached_property" in marks:
        kind = "property"
    args = function.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    args.defaults = [ast.Constant(...) for _ in args.defaults]
    args.kw_defaults = [d and ast.Constant(...) for d in args.kw_defaults]
    return f"{'abstract ' if 'abstractmethod' in marks else ''}{kind} ({ast.unparse(args)})"


def _fields(cls: ast.ClassDef | None) -> str:
    """Return the dataclass's fields in order. Fields with a default are marked."""
    return ", ".join(
        f"{n.target.id}{'=...' if n.value is not None else ''}"
        for n in (cls.body if cls is not None else ())
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and "ClassVar" not in ast.unparse(n)
    )


def _attributes(tree: ast.Module, name: str) -> set[str]:
    """Return the attributes of instances of the class: class body, assignments to self, and bases in the same file."""
    cls = _class(tree, name)
    if cls is None:
        return set()
    found = {f.name for f in _functions(cls)}
    for statement in cls.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    for base in cls.bases:
        found |= _attributes(tree, ast.unparse(base))
    return found


def parse_methods(lines: Mapping[str, str]) -> dict[str, Method]:
    """Read back the recorded methods of a class, by name."""
    return {name: parse_method(line) for name, line in lines.items()}


def parse_method(line: str) -> Method:
    """Read back one recorded method, such as ``abstract method (self, layer_name)``."""
    head, _, arguments = line.partition(" (")
    lambda_ = ast.parse(f"lambda {arguments.removesuffix(')')}: 0", mode="eval").body
    assert isinstance(lambda_, ast.Lambda)
    args, kinds = lambda_.args, inspect.Parameter
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    parameters = [
        kinds(
            a.arg,
            kinds.POSITIONAL_ONLY if a in args.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if i < required else ...,
        )
        for i, a in enumerate(plain)
    ]
    if args.vararg is not None:
        parameters.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if d is None else ...)
        for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        parameters.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return Method(head.rpartition(" ")[2], inspect.Signature(parameters), head.startswith("abstract "))
