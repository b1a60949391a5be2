"""Lookups of a trial: some are asked twice, some are answered with *later*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.trial.trial import Trial

LOOKUPS_PER_REPEAT: Final = 5


def listen_to_lookups(trial: Trial) -> None:
    """Let lookups answer None while `deferrals` lasts, as a slow tier's do; ask kvpipe twice now and then."""
    if trial.kvpipe is not None:
        _report_lookups(trial, trial.kvpipe)
    shape = trial.shape
    if shape.drafter and shape.states and not shape.masks:  # what vLLM caches is not found: it caches states only then
        trial.scheduler.kv_cache_manager.prefix_cache_lookup_enabled = lambda _: False  # type: ignore[method-assign]
    lookups = 0
    connector: Any = trial.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def lookup(request: Request, computed: int) -> tuple[int | None, bool]:
        nonlocal lookups
        lookups += 1
        answer: tuple[int | None, bool] = ask(request, computed)
        if trial.kvpipe is not None and not lookups % LOOKUPS_PER_REPEAT:
            again = ask(request, computed)
            if again != answer:
                trial.violations.append(f"lookups_are_idempotent: {request.request_id}: {answer}, then {again}")
        if trial.deferrals:
            trial.deferrals -= 1
            return None, False
        return answer

    connector.get_num_new_matched_tokens = lookup


def _report_lookups(trial: Trial, connector: Any) -> None:  # noqa: ANN401
    """Call `on_lookup` for each lookup of kvpipe's, with its answer."""
    ask = connector.get_num_new_matched_tokens

    def lookup(request: Request, computed: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = ask(request, computed)
        trial.on_lookup(request, computed, answer)
        return answer

    connector.get_num_new_matched_tokens = lookup
