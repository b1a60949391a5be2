"""Which tokens of a request attend to each other in both directions: those of images, in some models.

vLLM computes such an image in one step on a GPU (`disable_chunked_mm_input`), but not behind a hit that ends inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvpipe.scheduler.base import Span, SpansOf


def spans_of(config: VllmConfig) -> SpansOf | None:
    """Return what finds the spans of a request; None for a model whose tokens attend to earlier ones alone."""
    return _spans if config.model_config.is_mm_prefix_lm else None  # type: ignore[return-value]  # vLLM's request has more


def _spans(request: Request) -> Sequence[Span]:
    """Return the placeholders of all media but sound, to which vLLM's runners give no such attention.

    Prompts that operators or hints name have none: nothing is computed for them.
    """
    features = getattr(request, "mm_features", ())
    places = (one.mm_position for one in features if one.modality != "audio")
    return [(place.offset, place.offset + place.length) for place in places]
