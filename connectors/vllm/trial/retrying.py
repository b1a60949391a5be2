"""A connector with a fault: it tries a failed load again, which vLLM's scheduler does not survive. For tests only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.statemachine.request import RECOMPUTING

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Answer, Request


class RetryingSide(SchedulerSide):
    """Forgets, at the next lookup, that a load of the request has failed."""

    def lookup(self, request: Request, local_tokens: int, *, elsewhere: bool = False) -> Answer:
        """Look up as if the request were new."""
        tracked = self.requests.tracked.get(request.request_id)
        if tracked is not None and tracked.state.row == RECOMPUTING:
            del self.requests.tracked[request.request_id]
        return super().lookup(request, local_tokens, elsewhere=elsewhere)


class RetryingConnector(KVPipeConnector):
    """Kvpipe with `RetryingSide`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Take what vLLM passes."""
        super().__init__(*args, **kwargs)
        if self.scheduler is not None:
            self.scheduler.__class__ = RetryingSide
