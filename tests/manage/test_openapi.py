"""The OpenAPI document describes what the server does: authorization, requests and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openapi_spec_validator
import pytest
from fastapi.routing import APIRoute

from kvpipe.manage import models
from kvpipe.manage.api import make_app
from tests.manage.conftest import Managed
from tests.rigs.scheduler_world import UNIT

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
    """Yield an engine that serves, or an idle engine. Orders wait for a step of an engine that serves."""
    managed.save("a", 4, salt="a")
    managed.engine.wait_s_max = 0.01
    if not request.param:
        managed.busy()
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
    """Every status that the server returns is in the document, with the schema of the answer."""
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


def test_pending_order_is_answered_with_202(managed: Managed) -> None:
    """An order that waits for a step is answered with 202. No schema of a 200 answer matches it."""
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
    """The server refuses the shape of a body if and only if the document's schema rejects the body."""
    managed.engine.wait_s_max = 0.01  # orders wait for steps, and the engine makes no steps
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
    """The document states that a bearer token is needed, and each reference in the document leads to a schema."""
    document = managed.good("GET", "/openapi.json")
    (named,) = document["security"]
    assert [document["components"]["securitySchemes"][name] for name in named] == [{"type": "http", "scheme": "bearer"}]
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(_references(document)) <= known


def test_no_body_is_read_by_pydantic(managed: Managed) -> None:
    """Pydantic would report all mistakes of a body.

    The engine would wait for the interpreter while Pydantic finds 100,000 mistakes.
    """
    app = make_app(managed.engine, managed.side.counters)
    routes = [one for one in app.routes if isinstance(one, APIRoute)]
    assert len(routes) > 5
    assert [one.path for one in routes if one.body_field is not None] == []


OPERATIONS = {
    "state": "GET /v1/state engine",
    "counters": "GET /v1/counters engine",
    "switches": "GET /v1/switches engine",
    "switch": "PUT /v1/switches engine",
    "holders": "GET /v1/holders cache",
    "lookup": "POST /v1/lookup cache",
    "pins": "GET /v1/pins cache",
    "pin": "POST /v1/pins cache",
    "unpin": "DELETE /v1/pins/{pin} cache",
    "evict": "POST /v1/evict cache",
    "evict_matching": "POST /v1/evict/matching cache",
    "warm": "POST /v1/warm cache",
    "order": "GET /v1/orders/{order} cache",
}
"""The operations by their ids. Clients are generated from these ids, so the ids must not change."""


def test_operations_keep_their_ids_and_tags(managed: Managed) -> None:
    """In a generated client, functions have the names of the ids, and modules the names of the tags.

    Every tag has a description.
    """
    document = managed.good("GET", "/openapi.json")
    there = {
        one["operationId"]: f"{method.upper()} {path} {' '.join(one['tags'])}"
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }
    assert there == OPERATIONS
    described = {one["name"] for one in document["tags"] if one["description"]}
    assert described == {text.rsplit(" ", 1)[1] for text in OPERATIONS.values()}


def test_everything_in_the_document_has_a_description(managed: Managed) -> None:
    """Each operation, parameter, response, schema and field has a description that names no page of the repository."""
    document = managed.good("GET", "/openapi.json")
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    parts = {one["operationId"]: one for one in operations}
    for one in operations:
        name = one["operationId"]
        parts |= {f"{name}.{part['name']}": part for part in one.get("parameters", [])}
        parts |= {f"{name}.{status}": part for status, part in one["responses"].items()}
    for name, schema in document["components"]["schemas"].items():
        parts |= {name: schema} | {f"{name}.{field}": part for field, part in schema.get("properties", {}).items()}
    assert len(parts) > 150
    assert [name for name, part in parts.items() if not part.get("description")] == []
    assert "docs/" not in str(document)


def test_the_document_is_openapi(managed: Managed) -> None:
    """A validator of OpenAPI 3.1 accepts the document, so generators can read it."""
    openapi_spec_validator.validate(managed.good("GET", "/openapi.json"))
