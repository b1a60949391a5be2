"""No test depends on the speed of the machine: limits are long, and no test asserts the duration of a call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kvpipe.testing.waiting import WAIT_S
from tests.unit.test_house import FILES

FOLDERS = ("tests/", "property_tests/", "kvpipe/testing/")
CLOCKS = {"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns"}
PAUSE_S_MAX = 0.01
"""A call with at most this many seconds counts as a pause, not as a limit."""
LIMITED = {"fail_after", "settimeout", "wait", "join", "result", "communicate", "acquire"}
"""Names of calls that have a limit as their only argument, or as the argument `timeout`."""
SHORT_ON_PURPOSE = {
    "tests/engine/serving.py": 60,  # this limit only decides when a server is killed, and no test depends on that
}
"""Short limits on which no test's result depends."""


def _reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in CLOCKS
        for one in ast.walk(node)
    )


def _short(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and PAUSE_S_MAX < node.value < WAIT_S


def _limits(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the limits that a call has as arguments."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    yield from (word.value for word in call.keywords if word.arg == "timeout")
    if name in LIMITED and len(call.args) == 1:
        yield call.args[0]


def _why(node: ast.AST) -> str:
    """Return the reason why a node makes a test fail on a slow machine, or "" if there is none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "a short limit" if _reads_a_clock(node.left) and _short(node.right) else ""
    if isinstance(node, ast.Assert):
        orders = [one for one in ast.walk(node.test) if isinstance(one, ast.Compare)]
        less = [one for one in orders if isinstance(one.ops[0], ast.Lt | ast.LtE) and _reads_a_clock(one.left)]
        return "a time that something took" if any(_short(one.comparators[0]) for one in less) else ""
    if isinstance(node, ast.Call):
        given = {word.arg: word.value for word in node.keywords}
        none = given.get("deadline", ast.Constant(None))
        if not (isinstance(none, ast.Constant) and none.value is None):
            return "a deadline"
        return "a short limit" if any(map(_short, _limits(node))) else ""
    return ""


def hurried(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of every part of `text` that makes a test fail on a slow machine."""
    for node in ast.walk(ast.parse(text)):
        if (why := _why(node)) and isinstance(node, ast.expr | ast.stmt):
            yield node.lineno, why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("until = time.monotonic() + 5", "a short limit"),
        ("assert time.monotonic() - begin < 2.5", "a time that something took"),
        ("assert time.perf_counter() - begin <= 2", "a time that something took"),
        ("subprocess.run(command, timeout=30)", "a short limit"),
        ("assert begun.wait(10)", "a short limit"),
        ("with anyio.fail_after(2): pass", "a short limit"),
        ("lock.acquire(timeout=1)", "a short limit"),
        ("settings(deadline=200)", "a deadline"),
    ],
)
def test_every_dependence_on_speed_is_found(text: str, why: str) -> None:
    """`hurried` finds every way in which a test can depend on speed."""
    assert [found for _, found in hurried(text)] == [why]


@pytest.mark.parametrize(
    "text",
    [
        "until = time.monotonic() + WAIT_S",
        "assert time.monotonic() - begin > 2.5",
        "subprocess.run(command, timeout=5 * WAIT_S)",
        "assert not begun.wait(0)",
        "', '.join(names)",
        "settings(deadline=None)",
    ],
)
def test_lower_bounds_and_calls_without_a_limit_are_accepted(text: str) -> None:
    """A lower bound on a duration, or a call without a limit, does not fail on a slow machine."""
    assert not list(hurried(text))


def test_no_test_is_hurried() -> None:
    """A short limit is allowed only for a call that must time out, never for a call that must be quick."""
    found = [
        f"{name}:{line}: {why}"
        for name, text in FILES.items()
        if name.startswith(FOLDERS) and name not in SHORT_ON_PURPOSE and name != "tests/unit/test_waits.py"
        for line, why in hurried(text)
    ]
    assert not found, "\n".join(found)
