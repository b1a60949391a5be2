"""The paths of the management interface."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvpipe import __version__, config_errors
from kvpipe.manage import models
from kvpipe.manage.engine import BadRequestError, ManagedEngine
from kvpipe.trace.log import Counters

REQUESTS_SHOWN_MAX = 1000
_UNPROCESSABLE, _FAILED = 422, 500
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": models.Refused} for status in (401, 413, _UNPROCESSABLE)}

(_PROMPT,), _PROMPT_PARTS = msgspec.json.schema_components((models.Prompt,), ref_template="#/components/schemas/{name}")
_PROMPT_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _PROMPT}}}}


def make_app(engine: ManagedEngine, counters: Counters) -> FastAPI:
    """Return the application that serves `engine`. Refusals are counted in `counters`."""
    app = FastAPI(
        title="kvpipe", version=__version__, description="A running engine, for its operators. See docs/management.md.",
        docs_url=None, redoc_url=None, responses=_ERRORS,
    )  # fmt: skip

    @app.get("/v1/state")
    async def state(requests_max: Annotated[int, Query(ge=0, le=REQUESTS_SHOWN_MAX)] = 100) -> models.EngineState:
        """Return what the engine holds and does."""
        return engine.state(requests_max)

    @app.get("/v1/counters")
    async def counted() -> dict[str, int]:
        """Return counters and gauges of the scheduler's side, by name: see docs/counters.md."""
        return engine.counters()

    @app.get("/v1/switches")
    async def switches() -> models.SwitchStates:
        """Return the switches."""
        return engine.switches()

    @app.put("/v1/switches")
    async def switch(wanted: models.SetSwitches) -> models.SwitchStates:
        """Set switches, from the next step on, and return all."""
        return engine.switch(wanted)

    @app.post("/v1/lookup", openapi_extra=_PROMPT_BODY)
    async def lookup(request: Request) -> models.HeldTokens:
        """Return how much of a prompt is held in memory. Changes nothing."""
        return await engine.lookup(_prompt(await request.body()))

    _add_refusals(app, counters)
    app.openapi = functools.partial(_described, app)  # type: ignore[method-assign]
    return app


def _prompt(body: bytes) -> models.Prompt:
    try:
        return msgspec.json.decode(body, type=models.Prompt)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(config_errors.reason(str(error))) from None


def _described(app: FastAPI) -> dict[str, Any]:
    """Return what OpenAPI says of it, with what FastAPI does not read itself."""
    if app.openapi_schema is None:
        FastAPI.openapi(app)["components"]["schemas"] |= _PROMPT_PARTS
    return FastAPI.openapi(app)


def _add_refusals(app: FastAPI, counters: Counters) -> None:
    """Say in one way what is wrong, and count it."""

    def refuse(why: str, status: int = _UNPROCESSABLE) -> JSONResponse:
        counters.count("manage_refused", "request")
        return JSONResponse({"error": why}, status)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return refuse(config_errors.reason(str(error.detail)), error.status_code)

    @app.exception_handler(BadRequestError)
    async def bad(_: Request, error: BadRequestError) -> JSONResponse:
        return refuse(str(error))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:  # raised again, to who counts it
        return JSONResponse({"error": "it failed; the engine's log says why"}, _FAILED)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]  # what was given is not said again: it may be long
        where = ".".join(map(config_errors.name, problem["loc"]))
        return refuse(f"{where}: {config_errors.reason(problem['msg'])}")
