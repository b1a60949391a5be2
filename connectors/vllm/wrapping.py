"""Wrappers of vLLM's functions and methods, and of the connector's methods, whose exceptions vLLM must not see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_WRAPPED: Final = "_kvpipe_wrapped"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> bool:  # noqa: ANN401  (a module, class or object of vLLM's)
    """Replace `owner.name` by a function that calls `around` with the replaced function and the call's arguments.

    Returns False and changes nothing if `owner.name` is already wrapped.
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


def contained(miss: Callable[[], Any]) -> Callable[[F], F]:
    """Decorate a method of the connector: an exception is counted, and vLLM gets the result of `miss()`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return method(self, *args, **kwargs)
            except Exception as e:  # noqa: BLE001  (vLLM must not see the exception)
                self._contain(method.__name__, e)
                return miss()

        return cast("F", inner)

    return decorate
