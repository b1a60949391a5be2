"""Bodies of the management interface in which a key is given twice are refused."""

from __future__ import annotations

import pytest

from tests.manage.conftest import Managed


@pytest.mark.parametrize(
    "body",
    [
        b'{"freeze": true, "freeze": false}',
        b'{"freeze": true, "\\u0066reeze": true}',
        b'{"tokens": [1], "adapter": {"name": "a:b", "number": 1, "number": 2, "path": "/a"}}',
        b'{"tokens": [1], "adapter": {"name": "a", "number": 1, "path": "b"}, "cache_salt": "a", "cache_salt": "\\":"}',
    ],
)
def test_a_key_that_is_given_twice_is_refused(body: bytes, managed: Managed) -> None:
    """The server cannot know which of the two values is meant. A text that contains the name of a key is accepted."""
    method, path = ("PUT", "/v1/switches") if b"freeze" in body else ("POST", "/v1/lookup")
    status, answer = managed.ask(method, path, raw=body)
    assert status == 422
    assert "is given twice; keep one of them" in answer["error"]
    assert not managed.side.switches.freeze


def test_keys_in_texts_are_no_keys(managed: Managed) -> None:
    """For example, a salt may contain colons, quotes and names of fields."""
    salt = 'tokens": [1], "tokens": \\ {"cache_salt":'
    assert managed.ask("POST", "/v1/lookup", {"tokens": [1], "cache_salt": salt})[0] == 200
