"""The HTTP paths of the management interface."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvpipe import __version__
from kvpipe.inputs import config_errors
from kvpipe.inputs.unique_keys import TwiceError, parse_json
from kvpipe.manage import models
from kvpipe.manage.engine import BadRequestError, ManagedEngine, UnavailableError
from kvpipe.trace.log import Counters

REQUESTS_SHOWN_MAX = 1000
_PENDING, _UNPROCESSABLE, _FAILED, _UNAVAILABLE = 202, 422, 500, 503
_Responses = dict[int | str, dict[str, Any]]
_ERRORS: _Responses = {
    401: {"model": models.Refused, "description": "The token is missing or wrong."},
    413: {"model": models.Refused, "description": "The body has more than 1 MiB."},
    _UNPROCESSABLE: {"model": models.Refused, "description": "A field, key or value was refused."},
}
_ORDER: _Responses = {
    _PENDING: {
        "model": models.Pending,
        "description": "The order was not carried out within 5 seconds. GET /v1/orders returns its result later.",
    },
    _UNAVAILABLE: {"model": models.Refused, "description": "Too many orders wait, or the engine is shutting down."},
}
_READ: _Responses = {_UNAVAILABLE: {"model": models.Refused, "description": "The engine is busy, or is shutting down."}}
_TAGS: Final = {
    "engine": "The engine's state, counters and switches, as with `kvpipe engine`.",
    "cache": "The KV of prompts and of tenants that memory and tiers hold, as with `kvpipe cache`.",
}
_ENGINE, _CACHE = (list[str | Enum]([name]) for name in _TAGS)
_NUMBERS_MAX = 1 << 53
_BEARER = "operators"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_RowsMax = Annotated[int, Query(ge=0, le=REQUESTS_SHOWN_MAX, description="The largest number of rows in each list.")]
_RequestsMax = Annotated[
    int, Query(ge=0, le=REQUESTS_SHOWN_MAX, description="The largest number of requests in `requests_shown`.")
]
_PinNumber = Annotated[int, Path(ge=1, lt=_NUMBERS_MAX, description="The pin's number, as `pins` lists it.")]
_OrderNumber = Annotated[int, Path(ge=1, lt=_NUMBERS_MAX, description="The order's number, from the answer with 202.")]

_OrderAnswer = models.Pinned | models.EvictedChunks | models.Warmed
_T = TypeVar("_T", bound="models.Prompt | models.EvictMatching | models.SetSwitches")
_Answer = TypeVar("_Answer")
_BODIES = (
    models.PromptLookup, models.PinOrder, models.EvictOrder, models.EvictMatching, models.WarmOrder, models.SetSwitches,
)  # fmt: skip
_SCHEMAS, _BODY_PARTS = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
_LOOKUP_BODY, _PIN_BODY, _EVICT_BODY, _MATCHING_BODY, _WARM_BODY, _SWITCHES_BODY = (
    {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}} for schema in _SCHEMAS
)


def make_app(engine: ManagedEngine, counters: Counters) -> FastAPI:
    """Return the application that serves `engine`. Refusals are counted in `counters`.

    The name of a path's function is the path's operation id in OpenAPI. Do not rename these functions, because clients
    are generated from these ids.
    """
    app = FastAPI(
        title="kvpipe", version=__version__, description="A running engine, for its operators.",
        docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS, dependencies=[Depends(_check_query)],
        generate_unique_id_function=lambda route: route.name,
        openapi_tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )  # fmt: skip
    _add_questions(app, engine)
    _add_orders(app, engine)
    _add_refusals(app, counters)
    app.openapi = functools.partial(_described, app)  # type: ignore[method-assign]
    return app


def _add_questions(app: FastAPI, engine: ManagedEngine) -> None:
    """Add the paths that do not change the pool and are never answered with 202."""

    @app.get("/v1/state", tags=_ENGINE, responses=_READ)
    async def state(requests_max: _RequestsMax = 100) -> models.EngineState:
        """Return the engine's state."""
        return await engine.state(requests_max)

    @app.get("/v1/counters", tags=_ENGINE, responses=_READ)
    async def counters() -> dict[str, int]:
        """Return counters and gauges of the scheduler side, by name."""
        return await engine.counters()

    @app.get("/v1/switches", tags=_ENGINE)
    async def switches() -> models.SwitchStates:
        """Return the switches."""
        return engine.switches()

    @app.put("/v1/switches", tags=_ENGINE, openapi_extra=_SWITCHES_BODY)
    async def switch(request: Request) -> models.SwitchStates:
        """Set switches, from the next step on, and return the states of all switches."""
        return engine.switch(_read(await request.body(), models.SetSwitches))

    @app.get("/v1/holders", tags=_CACHE, responses=_READ)
    async def holders(rows_max: _RowsMax = 100) -> models.Holders:
        """Return the users of the pool, by salt and adapter, and the holders of leases."""
        return await engine.holders(rows_max)

    @app.post("/v1/lookup", tags=_CACHE, openapi_extra=_LOOKUP_BODY, responses=_READ)
    async def lookup(request: Request) -> models.HeldTokens:
        """Return how much of a prompt is held in memory and, on request, in tiers. The pool is not changed."""
        return await engine.lookup(_read(await request.body(), models.PromptLookup))


def _add_orders(app: FastAPI, engine: ManagedEngine) -> None:
    """Add the paths of pins and orders. An order that still waits for a step of the engine is answered with 202."""

    def answer(result: _Answer | models.Pending) -> _Answer | JSONResponse:
        return JSONResponse(result.model_dump(), _PENDING) if isinstance(result, models.Pending) else result

    @app.get("/v1/pins", tags=_CACHE, responses=_READ)
    async def pins() -> models.PinnedPrompts:
        """Return all pins."""
        return await engine.pins()

    @app.post("/v1/pins", tags=_CACHE, openapi_extra=_PIN_BODY, responses=_ORDER, response_model=models.Pinned)
    async def pin(request: Request) -> models.Pinned | JSONResponse:
        """Pin the chunks in memory of a prompt."""
        return answer(await engine.pin(_read(await request.body(), models.PinOrder)))

    @app.delete("/v1/pins/{pin}", tags=_CACHE, responses=_ORDER, response_model=models.Pinned)
    async def unpin(pin: _PinNumber) -> models.Pinned | JSONResponse:
        """End a pin."""
        return answer(await engine.unpin(pin))

    @app.post(
        "/v1/evict", tags=_CACHE, openapi_extra=_EVICT_BODY, responses=_ORDER, response_model=models.EvictedChunks
    )
    async def evict(request: Request) -> models.EvictedChunks | JSONResponse:
        """Evict the chunks in memory of a prompt. The chunks in tiers stay there."""
        return answer(await engine.evict(_read(await request.body(), models.EvictOrder)))

    @app.post(
        "/v1/evict/matching",
        tags=_CACHE,
        openapi_extra=_MATCHING_BODY,
        responses=_ORDER,
        response_model=models.EvictedChunks,
    )
    async def evict_matching(request: Request) -> models.EvictedChunks | JSONResponse:
        """Evict the chunks in memory of tenants, or chunks that are long unused. The chunks in tiers stay there."""
        return answer(await engine.evict_matching(_read(await request.body(), models.EvictMatching)))

    @app.post("/v1/warm", tags=_CACHE, openapi_extra=_WARM_BODY, responses=_ORDER, response_model=models.Warmed)
    async def warm(request: Request) -> models.Warmed | JSONResponse:
        """Fetch the chunks of a prompt from tiers into memory, and pin them there on request."""
        return answer(await engine.warm(_read(await request.body(), models.WarmOrder)))

    @app.get("/v1/orders/{order}", tags=_CACHE, responses=_ORDER, response_model=_OrderAnswer)
    async def order(order: _OrderNumber) -> _OrderAnswer | JSONResponse:
        """Return the result of an order that was pending."""
        result: _OrderAnswer | models.Pending = await engine.order(order)
        return answer(result)


async def _check_query(request: Request) -> None:
    """Refuse a query with an unknown or repeated key. FastAPI would accept such a query."""
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for key, times in Counter(key for key, _ in request.query_params.multi_items()).items():
        if key not in known:
            raise BadRequestError(f"query: unknown key {config_errors.safe_name(key)!r}; {_query_keys(known)}")
        if times > 1:
            raise BadRequestError(f"query.{key}: it is given {times} times; give it once")


def _query_keys(known: Sequence[str]) -> str:
    return f"this path has {', '.join(known)}" if known else "this path has none"


def _read(body: bytes, kind: type[_T]) -> _T:
    try:
        found = msgspec.json.decode(body, type=kind)
        # some key is repeated; msgspec would keep the key's last value
        if _STRING.sub(b"", body).count(b":") > _keys(body):
            parse_json(body)
    except TwiceError as error:
        raise BadRequestError(f"the body: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequestError(config_errors.pydantic_reason(_field_first(str(error)))) from None
    return found


def _keys(body: msgspec.Raw | bytes) -> int:
    """Return the number of different keys in a JSON object, plus the numbers of keys in all objects inside."""
    table = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return len(table) + sum(_keys(value) for value in table.values() if bytes(value).startswith(b"{"))


def _field_first(message: str) -> str:
    """Rewrite msgspec's message "TEXT - at `$.FIELD`" as "FIELD: TEXT", and return it."""
    text, at, field = message.partition(" - at `$")
    return f"{field.strip('.`') or 'the body'}: {text}" if at else message


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the application's OpenAPI document.

    The document has the bearer token and the schemas of msgspec's bodies.
    """
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"]["schemas"] |= _BODY_PARTS
        document["components"]["securitySchemes"] = {_BEARER: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_BEARER: []}]
        return document
    return app.openapi_schema


def _add_refusals(app: FastAPI, counters: Counters) -> None:
    """Add the handlers of errors. Each error is answered with `{"error": TEXT}`, and is counted."""

    def refuse(why: str, status: int = _UNPROCESSABLE) -> JSONResponse:
        counters.count("manage_refused", "request")
        return JSONResponse({"error": why}, status)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return refuse(config_errors.pydantic_reason(str(error.detail)), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> JSONResponse:
        return refuse(str(error))

    @app.exception_handler(UnavailableError)
    async def unavailable(_: Request, error: UnavailableError) -> JSONResponse:
        return refuse(str(error), _UNAVAILABLE)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:  # Starlette raises the error again; `Guard` counts it
        return JSONResponse({"error": "the request failed; the reason is in the engine's log"}, _FAILED)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]  # the message does not quote the input, which may be long
        where = ".".join(map(config_errors.safe_name, problem["loc"]))
        return refuse(f"{where}: {config_errors.pydantic_reason(problem['msg'])}")
