"""Keys of configuration, in words: suggested when misspelt, explained when wrong, listed in the docs."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_NEAR_MIN, _WORD_BONUS = 0.5, 0.25  # likeness from which a name is suggested; what a shared word adds

Fields = Mapping[str, FieldInfo]


def suggest(
    wrong: object, valid: Iterable[str], what: str = "valid keys are", shown: Callable[[str], str] = str
) -> str:
    """Return the remedy for a misspelt name: the valid one that looks most like it, or all of them.

    One that shares a whole word looks more like it.
    """
    names, key = list(valid), str(wrong).lower().replace("-", "_")

    def score(name: str) -> float:
        common = set(key.split("_")) & set(name.split("_"))
        return difflib.SequenceMatcher(None, key, name).ratio() + (_WORD_BONUS if common else 0)

    best = max(names, key=score)
    return f"did you mean {shown(best)!r}?" if score(best) >= _NEAR_MIN else f"{what} {', '.join(map(shown, names))}"


def first_problem(error: ValidationError, fields: Fields, owner: str = "valid keys are") -> str:
    """Return the first thing that is wrong, in one sentence: the key, its value, the reason and the remedy.

    Not shown is the value of a key that is unknown, or that names a variable for a secret: it may be the secret itself.
    `owner`: what has these keys, for a list of them.
    """
    problems = error.errors()  # a key that is unknown may be the one that is missing, written wrongly
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    if not problem["loc"]:  # keys that contradict each other
        return _reason(problem["msg"])
    key = ".".join(map(str, problem["loc"]))
    known = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {suggest(key, fields, owner)}"
    if problem["type"] == "missing":
        return f"{key} is missing; {key} means: {fields[known].description}"
    given = problem["input"]
    value = "" if known.endswith("_env") else f"={reprlib.repr(public(given) if isinstance(given, str) else given)}"
    field = fields[known]
    default = "" if field.is_required() else f" Default: {_text(field.default)}"
    return f"{key}{value} is not valid ({_reason(problem['msg'])}); {key} means: {field.description}{default}"


def public(text: str) -> str:
    """Return a text without what may be secret where it is a URL: user, password and query."""
    scheme, mark, rest = text.partition("://")
    if not mark and "@" not in text:
        return text
    rest = (rest if mark else text).rpartition("@")[2]
    return f"{scheme}{mark}{re.split('[?#]', rest)[0]}" if mark else rest


def table(fields: Fields) -> str:
    """Return a row per key in Markdown: its name, its default, what it does."""
    rows = ["| key | default | what it does |", "|---|---|---|"]
    for key, field in fields.items():
        default = "" if field.default in {None, "", (), PydanticUndefined} else f"`{_text(field.default)}`"
        rows.append(f"| `{key}` | {default} | {str(field.description).replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _text(value: object) -> str:
    if isinstance(value, ByteSize):
        return value.human_readable()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(message: str) -> str:
    return message.removeprefix("Value error, ")
