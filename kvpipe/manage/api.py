"""The paths of the management interface."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvpipe import __version__, config_errors
from kvpipe.manage import models
from kvpipe.manage.engine import BadRequestError, EndedError, ManagedEngine
from kvpipe.trace.log import Counters
from kvpipe.unique_keys import TwiceError, parse_json

REQUESTS_SHOWN_MAX = 1000
_PENDING, _UNPROCESSABLE, _FAILED, _UNAVAILABLE = 202, 422, 500, 503
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": models.Refused} for status in (401, 413, _UNPROCESSABLE)}
_ORDER: dict[int | str, dict[str, Any]] = {_PENDING: {"model": models.Pending}, _UNAVAILABLE: {"model": models.Refused}}
_NUMBERS_MAX = 1 << 53
_BEARER = "operators"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_Number = Annotated[int, Path(ge=1, lt=_NUMBERS_MAX)]

_Ordered = models.Pinned | models.EvictedChunks | models.Warmed
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
    """Return the application that serves `engine`. Refusals are counted in `counters`."""
    app = FastAPI(
        title="kvpipe", version=__version__, description="A running engine, for its operators. See docs/management.md.",
        docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS, dependencies=[Depends(_check_query)],
    )  # fmt: skip

    @app.get("/v1/state")
    async def state(requests_max: Annotated[int, Query(ge=0, le=REQUESTS_SHOWN_MAX)] = 100) -> models.EngineState:
        """Return the engine's state."""
        return engine.state(requests_max)

    @app.get("/v1/holders")
    async def holders(rows_max: Annotated[int, Query(ge=0, le=REQUESTS_SHOWN_MAX)] = 100) -> models.Holders:
        """Return who uses the pool, by salt and adapter, and who holds leases."""
        return await engine.holders(rows_max)

    @app.get("/v1/counters")
    async def counted() -> dict[str, int]:
        """Return counters and gauges of the scheduler side, by name: see docs/counters.md."""
        return engine.counters()

    @app.get("/v1/switches")
    async def switches() -> models.SwitchStates:
        """Return the switches."""
        return engine.switches()

    @app.put("/v1/switches", openapi_extra=_SWITCHES_BODY)
    async def switch(request: Request) -> models.SwitchStates:
        """Set switches, from the next step on, and return all."""
        return engine.switch(_read(await request.body(), models.SetSwitches))

    @app.post("/v1/lookup", openapi_extra=_LOOKUP_BODY)
    async def lookup(request: Request) -> models.HeldTokens:
        """Return how much of a prompt is held in memory and, on request, in tiers. Changes nothing."""
        return await engine.lookup(_read(await request.body(), models.PromptLookup))

    _add_orders(app, engine)
    _add_refusals(app, counters)
    app.openapi = functools.partial(_described, app)  # type: ignore[method-assign]
    return app


def _add_orders(app: FastAPI, engine: ManagedEngine) -> None:
    """Add the paths that change the pool. An order that waits for a step of the engine is answered with 202."""

    def answer(result: _Answer | models.Pending) -> _Answer | JSONResponse:
        return JSONResponse(result.model_dump(), _PENDING) if isinstance(result, models.Pending) else result

    @app.get("/v1/pins")
    async def pins() -> models.PinnedPrompts:
        """Return all pins."""
        return engine.pins()

    @app.post("/v1/pins", openapi_extra=_PIN_BODY, responses=_ORDER, response_model=models.Pinned)
    async def pin(request: Request) -> models.Pinned | JSONResponse:
        """Pin what memory holds of a prompt."""
        return answer(await engine.pin(_read(await request.body(), models.PinOrder)))

    @app.delete("/v1/pins/{pin}", responses=_ORDER, response_model=models.Pinned)
    async def unpin(pin: _Number) -> models.Pinned | JSONResponse:
        """End a pin."""
        return answer(await engine.unpin(pin))

    @app.post("/v1/evict", openapi_extra=_EVICT_BODY, responses=_ORDER, response_model=models.EvictedChunks)
    async def evict(request: Request) -> models.EvictedChunks | JSONResponse:
        """Evict what memory holds of a prompt. Tiers keep what they hold."""
        return answer(await engine.evict(_read(await request.body(), models.EvictOrder)))

    @app.post("/v1/evict/matching", openapi_extra=_MATCHING_BODY, responses=_ORDER, response_model=models.EvictedChunks)
    async def evict_matching(request: Request) -> models.EvictedChunks | JSONResponse:
        """Evict what memory holds of tenants, or what was not used for some time. Tiers keep what they hold."""
        return answer(await engine.evict_matching(_read(await request.body(), models.EvictMatching)))

    @app.post("/v1/warm", openapi_extra=_WARM_BODY, responses=_ORDER, response_model=models.Warmed)
    async def warm(request: Request) -> models.Warmed | JSONResponse:
        """Fetch what tiers hold of a prompt into memory, and pin it there on request."""
        return answer(await engine.warm(_read(await request.body(), models.WarmOrder)))

    @app.get("/v1/orders/{order}", responses=_ORDER, response_model=_Ordered)
    async def ordered(order: _Number) -> _Ordered | JSONResponse:
        """Return the result of an order that was pending."""
        result: _Ordered | models.Pending = await engine.order(order)
        return answer(result)


async def _check_query(request: Request) -> None:
    """Refuse what FastAPI would ignore: keys that the path does not have, and a key given twice."""
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for key, times in Counter(key for key, _ in request.query_params.multi_items()).items():
        if key not in known:
            raise BadRequestError(f"query: unknown key {config_errors.name(key)!r}; {_query_keys(known)}")
        if times > 1:
            raise BadRequestError(f"query.{key}: it is given {times} times; give it once")


def _query_keys(known: Sequence[str]) -> str:
    return f"this path has {', '.join(known)}" if known else "this path has none"


def _read(body: bytes, kind: type[_T]) -> _T:
    try:
        found = msgspec.json.decode(body, type=kind)
        if _STRING.sub(b"", body).count(b":") > _keys(body):  # msgspec keeps the last value of a key
            parse_json(body)
    except TwiceError as error:
        raise BadRequestError(f"the body: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequestError(config_errors.reason(_field_first(str(error)))) from None
    return found


def _keys(body: msgspec.Raw | bytes) -> int:
    """Return how many different keys an object has, those of objects in it included."""
    table = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return len(table) + sum(_keys(value) for value in table.values() if bytes(value).startswith(b"{"))


def _field_first(message: str) -> str:
    """Return a message of msgspec's, "TEXT - at `$.FIELD`", as "FIELD: TEXT"."""
    text, at, field = message.partition(" - at `$")
    return f"{field.strip('.`') or 'the body'}: {text}" if at else message


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the application's OpenAPI document, with the token, and the schemas of the bodies that msgspec reads."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"]["schemas"] |= _BODY_PARTS
        document["components"]["securitySchemes"] = {_BEARER: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_BEARER: []}]
    return FastAPI.openapi(app)


def _add_refusals(app: FastAPI, counters: Counters) -> None:
    """Add the handlers that answer errors: always `{"error": TEXT}`, and counted."""

    def refuse(why: str, status: int = _UNPROCESSABLE) -> JSONResponse:
        counters.count("manage_refused", "request")
        return JSONResponse({"error": why}, status)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return refuse(config_errors.reason(str(error.detail)), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> JSONResponse:
        return refuse(str(error))

    @app.exception_handler(EndedError)
    async def ended(_: Request, error: EndedError) -> JSONResponse:
        return refuse(str(error), _UNAVAILABLE)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:  # Starlette raises it again, and `Guard` counts it
        return JSONResponse({"error": "it failed; the reason is in the engine's log"}, _FAILED)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]  # the input is not quoted: it may be long
        where = ".".join(map(config_errors.name, problem["loc"]))
        return refuse(f"{where}: {config_errors.reason(problem['msg'])}")
