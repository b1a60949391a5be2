"""Tables in JSON and YAML whose keys are each given once. With a key given twice nobody knows which value is meant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvpipe import config_errors


class TwiceError(ValueError):
    """A key is given twice."""


def once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a table of `pairs`. Raises `TwiceError`."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        msg = f"the key {config_errors.name(twice)!r} is given twice; keep one of them"
        raise TwiceError(msg)
    return table


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """Parse JSON that a person or a client wrote.

    Raises:
        TwiceError: a key is given twice.
        ValueError: it is not JSON.
        RecursionError: it is too deep.

    """
    return json.loads(text, object_pairs_hook=once)
