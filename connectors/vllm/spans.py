"""Spans of tokens that attend to each other in both directions, like the tokens of an image in some models.

On a GPU, vLLM computes such an image in one step (`disable_chunked_mm_input`). If a hit ended inside the image, vLLM
would compute only the rest of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvpipe.protocol.engine import SpansOf, WholeSpan


def spans_of(config: VllmConfig) -> SpansOf | None:
    """Return a function that finds a request's spans, or None if tokens of the model attend only to earlier tokens."""
    return _spans if config.model_config.is_mm_prefix_lm else None  # type: ignore[return-value]  # vLLM's request has more


def _spans(request: Request) -> Sequence[WholeSpan]:
    """Return the token ranges of all media except audio. Tokens of audio attend to earlier tokens only.

    Prompts that operators or hints name have no media, because nothing is computed for such prompts.
    """
    features = getattr(request, "mm_features", ())
    places = (one.mm_position for one in features if one.modality != "audio")
    return [(place.offset, place.offset + place.length) for place in places]
