"""Texts about configuration keys: suggestions for misspelt keys, reasons for wrong values, tables for the docs."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvpipe.inputs.values import BYTES_END, PATH_CHARS_MAX

_NEAR_MIN, _WORD_BONUS = 0.5, 0.25  # the lowest similarity of a suggested name; the bonus for a shared word

Fields = Mapping[str, FieldInfo]
NAME_CHARS_MAX: Final = 80
"""The largest number of characters of a user's key, scheme or kind that a message shows."""
_REASON_CHARS_MAX: Final = 300
_UNSHOWN: Final = frozenset({"salt", "db"})
"""Keys whose wrong values no message shows, because the value may be a password, as in `redis://HOST/PASSWORD`."""
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(:[0-9]{1,5})?(?=/|$)")
_LINK: Final = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")
"""A link to a page of the documentation. Messages have no links, because an installed wheel does not have the pages."""
_SHORT_PATH: Final = re.compile(r"/?|/[0-9]{1,2}")
"""A path that is not a secret: an empty path, or the number of a database."""
_RETIRED: Final = {"log_format": "vLLM's form applies to kvpipe's lines: use vLLM's --logging-config.formatter json"}
"""The advice in error messages for keys of earlier versions, by key."""


def suggest(
    wrong: object, valid: Iterable[str], what: str = "valid keys are", shown: Callable[[str], str] = str
) -> str:
    """Return the advice for a misspelt name: the most similar name of `valid`, or all names if no name is similar.

    A name that shares a whole word with `wrong` counts as more similar. `shown` formats a name. `what` is the text
    before the list of all names.
    """
    names, key = list(valid), safe_name(wrong).lower().replace("-", "_") if isinstance(wrong, str) else ""
    if key in _RETIRED:
        return _RETIRED[key]

    def score(name: str) -> float:
        common = set(key.split("_")) & set(name.split("_"))
        return difflib.SequenceMatcher(None, key, name).ratio() + (_WORD_BONUS if common else 0)

    best = max(names, key=score)
    return f"did you mean {shown(best)!r}?" if score(best) >= _NEAR_MIN else f"{what} {', '.join(map(shown, names))}"


def first_problem(error: ValidationError, fields: Fields, owner: str = "valid keys are") -> str:
    """Return the first problem of `error` in one sentence: the key, its value, the reason and the advice.

    A value that may be a secret is not shown. This rule applies to an unknown key, a key that names a variable for a
    secret, a key in `_UNSHOWN`, and a key with ``repr=False``. `owner` is the text before the list of valid keys.
    """
    problems = error.errors()  # unknown keys come first, because an unknown key may be the misspelling of a missing key
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    if not problem["loc"]:  # the problem is that keys contradict each other
        return pydantic_reason(problem["msg"])
    key = ".".join(map(safe_name, problem["loc"]))
    known = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {suggest(problem['loc'][0], fields, owner)}"
    if problem["type"] == "missing":
        return f"{key} is missing; {key} means: {_LINK.sub('', str(fields[known].description))}"
    field = fields[known]
    hidden = known.endswith("_env") or known in _UNSHOWN or not field.repr
    given = problem["input"]
    if known == "host" and isinstance(given, str):
        given = given.partition("/")[0]  # the path may be a password, too
    value = "" if hidden and given != "" else shown(given)
    default = "" if field.is_required() else f" Default: {_text(field.default)}"
    means = _LINK.sub("", str(field.description))
    return f"{key}{value} is not valid ({pydantic_reason(problem['msg'])}); {key} means: {means}{default}"


def shown(value: object) -> str:
    """Return ``=value`` for a message, without secrets. For a table or a list, return only the type."""
    if isinstance(value, str):
        return f"={reprlib.repr(public_url(value[:PATH_CHARS_MAX]))}"
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < BYTES_END):
        return f"={value!r}"
    return f", a number of {value.bit_length()} bits," if isinstance(value, int) else f" of type {type(value).__name__}"


def safe_name(value: object) -> str:
    """Shorten a user's key, scheme or kind for a message. The result is printable and has no credentials."""
    text = public_url(value[:PATH_CHARS_MAX]) if isinstance(value, str) else ""
    if not isinstance(value, str):
        text = str(value) if isinstance(value, float) or value is None else ""
        text = text or (str(value) if isinstance(value, int) and abs(value) < BYTES_END else type(value).__name__)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= NAME_CHARS_MAX else text[: NAME_CHARS_MAX - 3] + "..."


def error_place(error: Exception) -> str:
    """Return why parsing failed, with line and column.

    The result contains no part of the parsed text, because the text may contain secrets.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
    if mark is not None:
        line, column = mark.line + 1, mark.column + 1
    why = str(getattr(error, "msg", "")) if line and mark is None else ""
    return f"{why or 'a mistake'} at line {line}, column {column}" if line else "a value in it cannot be parsed"


def public_url(text: str) -> str:
    """Return a URL without user, password, path and query. Any other text is returned without its query.

    The path is kept if the URL is of a file, or if the path is the number of a database.
    """
    scheme, mark, rest = text.partition("://")
    if not mark and "@" not in text:
        return re.split(r"[?#&](?=.*=)", text, maxsplit=1, flags=re.DOTALL)[0]
    rest = (rest if mark else text).rpartition("@")[2]
    if not mark:
        return rest
    rest = re.split("[?#]", rest)[0]
    host = _HOST.match(rest)
    if scheme == "file" or (host is not None and _SHORT_PATH.fullmatch(rest[host.end() :])):
        return f"{scheme}://{rest}"
    return f"{scheme}://{host[0] + '/' if host is not None else ''}..."


def keys_table(fields: Fields) -> str:
    """Return a Markdown table with one row per key: the key's name, its default and its description."""
    rows = ["| key | default | what it does |", "|---|---|---|"]
    for key, field in fields.items():
        default = "" if field.default in {None, "", (), PydanticUndefined} else f"`{_text(field.default)}`"
        rows.append(f"| `{key}` | {default} | {str(field.description).replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _text(value: object) -> str:
    if isinstance(value, ByteSize):
        return value.human_readable()
    return str(value).lower() if isinstance(value, bool) else str(value)


def pydantic_reason(message: str) -> str:
    """Return pydantic's `message` as one printable line of at most 300 characters."""
    text = message.removeprefix("Value error, ")
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _REASON_CHARS_MAX else text[: _REASON_CHARS_MAX - 3] + "..."
