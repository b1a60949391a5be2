"""What the OpenAPI document describes is what the server does: who may ask, what is asked and what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.routing import APIRoute

from kvpipe.connectors.vllm.trial.scheduler_world import UNIT
from kvpipe.manage import models
from kvpipe.manage.api import make_app
from tests.manage.conftest import Managed

PROMPT = {"tokens": list(range(4 * UNIT)), "cache_salt": "a"}
ASKED: list[tuple[str, str, str, Any]] = [
    ("GET", "/v1/state", "/v1/state?requests_max=5", None),
    ("GET", "/v1/holders", "/v1/holders", None),
    ("GET", "/v1/counters", "/v1/counters", None),
    ("GET", "/v1/switches", "/v1/switches", None),
    ("PUT", "/v1/switches", "/v1/switches", {"freeze": False}),
    ("PUT", "/v1/switches", "/v1/switches", {"freeze": 1}),
    ("POST", "/v1/lookup", "/v1/lookup", PROMPT | {"tiers": True}),
    ("POST", "/v1/lookup", "/v1/lookup", PROMPT | {"tiers": 1}),
    ("GET", "/v1/pins", "/v1/pins", None),
    ("POST", "/v1/pins", "/v1/pins", PROMPT | {"seconds": 9.5}),
    ("POST", "/v1/pins", "/v1/pins", PROMPT | {"seconds": 0}),
    ("DELETE", "/v1/pins/{pin}", "/v1/pins/1", None),
    ("DELETE", "/v1/pins/{pin}", "/v1/pins/x", None),
    ("POST", "/v1/evict", "/v1/evict", PROMPT | {"from_token": UNIT}),
    ("POST", "/v1/evict", "/v1/evict", PROMPT | {"from_token": -1}),
    ("POST", "/v1/evict/matching", "/v1/evict/matching", {"cache_salt": "a", "idle_s": 5.0}),
    ("POST", "/v1/evict/matching", "/v1/evict/matching", {"salt_digest": "x"}),
    ("POST", "/v1/warm", "/v1/warm", PROMPT),
    ("POST", "/v1/warm", "/v1/warm", PROMPT | {"seconds": -1}),
    ("GET", "/v1/orders/{order}", "/v1/orders/7", None),
]


@pytest.fixture(params=[False, True], ids=["serving", "idle"])
def asked(managed: Managed, request: pytest.FixtureRequest) -> Managed:
    """An engine that serves, so that orders wait for its steps, or one that has nothing to do."""
    managed.save("a", 4, salt="a")
    managed.engine.wait_s_max = 0.01
    if request.param:
        managed.side.orders.turns.give()
    return managed


def _references(node: Any) -> Iterator[str]:
    for one in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _references(one)
    if isinstance(node, dict) and "$ref" in node:
        yield node["$ref"]


def _valid(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    whole = schema | {"components": document["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def test_answers_are_as_described(asked: Managed) -> None:
    """Every status that comes is in the document, with the schema of what comes with it."""
    document = asked.good("GET", "/openapi.json")
    for method, path, sent, body in ASKED:
        status, answered = asked.ask(method, sent, body)
        described = document["paths"][path][method.lower()]["responses"]
        assert str(status) in described, (method, sent, status)
        schema = described[str(status)]["content"]["application/json"]["schema"]
        assert _valid(document, schema, answered), (method, sent, answered)
    assert {(method, path) for method, path, _, _ in ASKED} == {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }


def test_what_is_pending_is_accepted_and_no_more(managed: Managed) -> None:
    """An order that waits for a step is 202: no schema of 200 allows that."""
    document = managed.good("GET", "/openapi.json")
    pending = models.Pending(order=1).model_dump()
    orders = [one for methods in document["paths"].values() for one in methods.values() if "202" in one["responses"]]
    assert len(orders) == 6
    for one in orders:
        good, accepted = (
            one["responses"][status]["content"]["application/json"]["schema"] for status in ("200", "202")
        )
        assert _valid(document, accepted, pending)
        assert not _valid(document, good, pending), one["operationId"]


def test_bodies_are_as_described(managed: Managed) -> None:
    """What the document calls valid is not refused for its shape, and what it calls wrong is refused."""
    managed.engine.wait_s_max = 0.01  # orders wait for steps, and it makes none
    document = managed.good("GET", "/openapi.json")
    for method, path, sent, body in ASKED:
        if body is None:
            continue
        described = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        for extra in ({}, {"more": 1}):
            status, answered = managed.ask(method, sent, body | extra)
            shapeless = (status == 422 and ": Expected `" in answered["error"]) or "unknown field" in str(answered)
            assert _valid(document, described, body | extra) == (not shapeless), (method, sent, answered)


def test_the_document_is_whole(managed: Managed) -> None:
    """Who reads it learns that there is a token, and where all that it refers to is."""
    document = managed.good("GET", "/openapi.json")
    (named,) = document["security"]
    assert [document["components"]["securitySchemes"][name] for name in named] == [{"type": "http", "scheme": "bearer"}]
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(_references(document)) <= known


def test_no_body_is_read_by_pydantic(managed: Managed) -> None:
    """It reports every mistake that a body has; while it looks for 100,000 the engine waits for the interpreter."""
    app = make_app(managed.engine, managed.side.counters)
    routes = [one for one in app.routes if isinstance(one, APIRoute)]
    assert len(routes) > 5
    assert [one.path for one in routes if one.body_field is not None] == []
