"""Types of configuration values, with their checks: numbers, sizes, paths and names of environment variables."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

BYTES_END: Final = 1 << 63
PATH_CHARS_MAX: Final = 4000


def no_bool(value: object) -> object:
    """Return `value`. Raises ValueError for non-finite numbers and booleans, which pydantic would read as 1 and 0."""
    if isinstance(value, bool):
        msg = "expected a number, not true or false"
        raise ValueError(msg)  # noqa: TRY004  (pydantic turns ValueError into its own report)
    if isinstance(value, float) and not math.isfinite(value):
        msg = "expected a finite number"
        raise ValueError(msg)
    return value


def _number_of_bytes(value: object) -> object:
    """Return `value`. Raises ValueError for numbers from 2**63 on, which pydantic cannot parse."""
    digits = re.match(r"\s*([0-9.]*)", value) if isinstance(value, str) else None
    if digits is not None and len(digits[1]) > len(str(BYTES_END)):
        value = BYTES_END
    return _fewer(value) if isinstance(value, int) and not isinstance(value, bool) else no_bool(value)


def _fewer(value: int) -> int:
    if abs(value) >= BYTES_END:
        msg = "expected fewer than 2**63 bytes"
        raise ValueError(msg)
    return value


Size = Annotated[ByteSize, BeforeValidator(_number_of_bytes), AfterValidator(_fewer)]
"""A number of bytes, or a text with a unit such as `8GiB`. The number of bytes is less than 2**63."""


def size_text(size: int) -> str:
    """Return `size` bytes, rounded, with a unit, as a user would write them: `8GiB`, `1.5GiB`."""
    return re.sub(r"\.0(?=[A-Z])", "", ByteSize(size).human_readable())


def exact_size(size: int) -> str:
    """Return an exact text for `size` bytes: as `size_text` if no rounding is needed, or else the number of bytes."""
    text = size_text(size)
    number, unit = text.rstrip("BKMGTPEi"), text.lstrip("0123456789.")
    return text if float(number) * 1024 ** "BKMGTPE".index(unit[0]) == size else f"{size}B"


def _local(value: object) -> object:
    text = str(value) if isinstance(value, str | Path) else ""
    if "://" in text:
        msg = "expected a path on this machine, not a URL"
        raise ValueError(msg)
    if "\0" in text or len(text) > PATH_CHARS_MAX:
        msg = f"expected a path of at most {PATH_CHARS_MAX} characters, and no zero byte among them"
        raise ValueError(msg)
    return value


LocalPath = Annotated[Path, BeforeValidator(_local)]
"""A path on this machine. It is not a URL, has no NUL bytes, and has at most `PATH_CHARS_MAX` characters."""


def _variable(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", value):
        msg = "expected the name of an environment variable"
        raise ValueError(msg)
    return value


Variable = Annotated[str, AfterValidator(_variable), Field(repr=False)]
"""The name of an environment variable with a secret. No message shows the name, because it may be the secret itself."""
