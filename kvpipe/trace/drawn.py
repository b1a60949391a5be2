"""Helpers for the writers of timelines. `written` writes a file completely or not at all. `plain` converts values."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

_EXACT_MAX = 1 << 53
"""JavaScript can round integers that are equal to this number or larger."""


@contextlib.contextmanager
def written(path: Path) -> Iterator[TextIO]:
    """Write `path` completely or not at all. An existing file is replaced only when the new text is complete."""
    if path.exists() and not path.is_file():  # a terminal or a pipe cannot be replaced
        with path.open("w", encoding="utf-8") as there:
            yield there
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".kvpipe-", delete=False) as out:
        try:
            yield cast("TextIO", out)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
    Path(out.name).replace(path)


def plain(value: Any) -> Any:  # noqa: ANN401  (any field of any event)
    """Convert a field's value into a value that JSON and JavaScript represent exactly.

    A number becomes text if JavaScript would round it (from 2^53), or if JSON lacks it (NaN, infinity).
    """
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT_MAX else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else str(value)
