"""The failure of a suite whose subclass does not override a required method."""

from __future__ import annotations

from typing import NoReturn

import pytest


def not_overridden(suite: object, method: str, what: str) -> NoReturn:
    """Fail a test of `suite`, because its class does not override `method`. `what` names the result of the method.

    The method is not abstract, because pytest silently skips a class with abstract methods.
    """
    name = type(suite).__name__
    pytest.fail(f"{name} does not override `{method}`: it must return {what}", pytrace=False)
