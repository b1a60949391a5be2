"""A connector with a fault, for tests only. The connector retries a failed load, and then vLLM's scheduler hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.statemachine.request import RECOMPUTING

if TYPE_CHECKING:
    from kvpipe.protocol.engine import LookupAnswer, Request


class RetryingSide(SchedulerSide):
    """A scheduler side that forgets a request's failed load at the request's next lookup."""

    def lookup(self, request: Request, local_tokens: int, *, elsewhere: bool = False) -> LookupAnswer:
        """Look up as if the request were new."""
        tracked = self.requests.tracked.get(request.request_id)
        if tracked is not None and tracked.state.row == RECOMPUTING:
            del self.requests.tracked[request.request_id]
        return super().lookup(request, local_tokens, elsewhere=elsewhere)


class RetryingConnector(KVPipeConnector):
    """kvpipe's connector with a `RetryingSide` as its scheduler side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Pass all arguments to `KVPipeConnector`."""
        super().__init__(*args, **kwargs)
        if self.scheduler is not None:
            self.scheduler.__class__ = RetryingSide
