"""Reads tables in JSON and YAML, and refuses repeated keys, because it is unknown which value the user wants."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvpipe.inputs import config_errors


class TwiceError(ValueError):
    """This error means that a table has a key twice."""


def once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of `pairs`. Raises `TwiceError` if a key is given twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        msg = f"the key {config_errors.safe_name(twice)!r} is given twice; keep one of them"
        raise TwiceError(msg)
    return table


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """Parse JSON that a person or a client wrote.

    Raises:
        TwiceError: a key is given twice.
        ValueError: the text is not JSON.
        RecursionError: the JSON is nested too deeply.

    """
    return json.loads(text, object_pairs_hook=once)
