"""How a suite fails whose user has not overridden what it needs."""

from __future__ import annotations

from typing import NoReturn

import pytest


def not_overridden(suite: object, method: str, what: str) -> NoReturn:
    """Fail a test of `suite`, whose class has no `method` of its own, which returns `what`.

    An abstract method would not do: pytest leaves out a class that has one, without a word.
    """
    name = type(suite).__name__
    pytest.fail(f"{name} does not override `{method}`: it must return {what}", pytrace=False)
