"""Checks whether a connector fits a recorded release of vLLM, and lists the news of a release."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpipe.connectors.vllm import compat
from tests.contract.relied import RELIED
from tests.contract.sources import Method, class_methods, parse_methods

CONNECTOR_SOURCE = Path(compat.__file__).resolve().parent / "connector.py"
CONSTRUCTOR = ("vllm_config", "role", "kv_cache_config")


def base_methods(contract: Mapping[str, Any]) -> dict[str, Method]:
    """Return the recorded methods of the classes that `KVPipeConnector` inherits from."""
    methods = contract["methods"]
    return parse_methods(methods["KVConnectorBase_V1"]) | parse_methods(methods["SupportsHMA"])


def calls(signature: inspect.Signature) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the shapes of call that `signature` allows. The value of each argument is the name of its parameter."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    plain = [p for p in parameters if p.kind in {kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD}]
    only = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    has_args = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    has_kwargs = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    # the first parameter is self or cls
    must_be_positional = 1 + sum(p.kind is kinds.POSITIONAL_ONLY for p in plain[1:])
    for optional in (False, True):
        given = [p.name for p in plain if optional or p.default is kinds.empty]
        named = {p.name: p.name for p in only if optional or p.default is kinds.empty}
        for split in range(len(given), min(must_be_positional, len(given)) - 1, -1):
            yield tuple(given[:split]), {n: n for n in given[split:]} | named
        if has_args and optional:
            yield (*given, "one_more"), named
        if has_kwargs:
            yield tuple(given), named | {"another_keyword": "another_keyword"}


def mismatches(contract: Mapping[str, Any], ours: Mapping[str, Method]) -> list[str]:
    """Return one sentence for each mismatch between a connector with the methods `ours` and `contract`."""
    found = []
    theirs = base_methods(contract)
    for name, base in theirs.items():
        mine = ours.get(name)
        if mine is None:
            if base.abstract:
                found.append(f"{name} is abstract in vLLM and not implemented")
            continue
        if mine.kind != base.kind:
            found.append(f"{name} is a {base.kind} in vLLM, here a {mine.kind}")
        found += [f"{name} does not accept {why}" for why in _refused(base.signature, mine.signature)]
    constructor = ours.get("__init__")
    if constructor is not None:
        names = tuple(n for n in constructor.signature.parameters if n != "self")[: len(CONSTRUCTOR)]
        if names != CONSTRUCTOR:
            found.append(f"the constructor takes {names}, not {CONSTRUCTOR}")
    for path, classes in RELIED.items():
        for cls, wanted in classes.items():
            have = contract["attributes"].get(path, {}).get(cls)
            if have is None:
                found.append(f"{path} has no class {cls}")
                continue
            found += [f"{cls}.{a} is not in {path}" for a in wanted if a not in have.split(", ")]
    found += [f"class {name} has no fields or does not exist" for name, text in contract["fields"].items() if not text]
    return found


def _refused(base: inspect.Signature, mine: inspect.Signature) -> Iterator[str]:
    for positional, named in calls(base):
        shown = ", ".join([*positional, *(f"{n}=" for n in named)])
        try:
            bound = mine.bind(*positional, **named)
        except TypeError as e:
            yield f"({shown}): {e}"
            return
        for name, value in bound.arguments.items():
            variadic = mine.parameters[name].kind in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
            if not variadic and value != name:
                yield f"({shown}): vLLM's {value} would arrive as {name}"
                return


def connector_methods() -> dict[str, Method]:
    """Return the methods that `KVPipeConnector` defines, read from its source."""
    return class_methods(CONNECTOR_SOURCE.read_text(encoding="utf-8"), "KVPipeConnector")


def supports(version: str) -> bool:
    """Whether `compat.SUPPORTED` names this release."""
    numbers = re.findall(r"\d+", version)
    return (int(numbers[0]), int(numbers[1])) in compat.SUPPORTED


def news(contract: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the additions of `contract` to `before`, and the parts that `contract` lacks.

    These differences are reported as news, and do not make kvpipe unfit.
    """
    out = []
    for name in sorted({*contract["methods"], *before["methods"]}):
        new, old = contract["methods"].get(name, {}), before["methods"].get(name, {})
        out += [f"new {name}.{m}: {new[m]}" for m in new if m not in old]
        out += [f"gone {name}.{m}" for m in old if m not in new]
        out += [f"changed {name}.{m}: {old[m]} -> {new[m]}" for m in new if m in old and new[m] != old[m]]
    for name in sorted({*contract["fields"], *before["fields"]}):
        new_fields = set(contract["fields"].get(name, "").split(", "))
        old_fields = set(before["fields"].get(name, "").split(", "))
        out += [f"new field {name}.{f}" for f in sorted(new_fields - old_fields)]
        out += [f"gone field {name}.{f}" for f in sorted(old_fields - new_fields)]
    return out
