"""vLLM's own functions and methods, wrapped where they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

_WRAPPED: Final = "_kvpipe_wrapped"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> bool:  # noqa: ANN401  (a module, class or object of vLLM's)
    """Have a call of `owner.name` be a call of `around`, whose first argument is what was called before.

    Once: returns False, and changes nothing, where it was done already.
    """
    call = getattr(owner, name)
    if hasattr(call, _WRAPPED):
        return False

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return around(call, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)
    return True
