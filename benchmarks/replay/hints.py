"""Clients' hints on their sessions: right, about right or wrong."""

from __future__ import annotations

import math
import random
from typing import Final

from benchmarks.replay.workload import Workload
from kvpipe.cache.hints import Action, Hint

NONE: Final = "none"
RESUME: Final = "resume"
"""When the next prompt comes that begins with most of this one; its pause is wrong by a log-normal factor."""
ADVERSARIAL: Final = "adversarial"
"""The contrary: the pause is turned round at a minute, and what is not used again is hinted to come in a second."""
TURNED: Final = "turned"
"""The first half of all prompts are hinted at right, the others to the contrary."""
CONSTANT: Final = "constant"
"""Each prompt is hinted to be resumed in a second."""
DEAD: Final = "dead"
"""What is not used again is announced to come in ten minutes; nothing is announced of the rest."""
MODELS: Final = (NONE, RESUME, ADVERSARIAL, TURNED, CONSTANT, DEAD)
_MINUTE_S: Final = 60.0


def resumes(workload: Workload) -> list[float | None]:
    """Return when the next prompt comes that begins with at least half of each, in seconds; None: never."""
    out, later = list[float | None](), dict[bytes, float]()
    for prompt in reversed(workload.prompts):
        keys = prompt.keys
        out.append(later.get(keys[len(keys) // 2]) if keys else None)
        later.update(dict.fromkeys(keys, prompt.at_s))
    return out[::-1]


def hints(workload: Workload, model: str, sigma: float, seed: int = 0) -> list[Hint | None]:
    """Return the hint that comes with each prompt. `sigma`: of the logarithm of the pause, for all models."""
    draw, out = random.Random(seed), list[Hint | None]()
    for number, (prompt, at_s) in enumerate(zip(workload.prompts, resumes(workload), strict=True)):
        wrong = math.exp(draw.gauss(0, sigma))
        if model == CONSTANT:
            out.append(Hint(Action.RESUME, prompt.at_s + 1.0))
            continue
        if model == DEAD:
            out.append(Hint(Action.RESUME, prompt.at_s + 10 * _MINUTE_S * wrong) if at_s is None else None)
            continue
        turned = model == ADVERSARIAL or (model == TURNED and number >= len(workload.prompts) // 2)
        if model == NONE or (at_s is None and not turned):
            out.append(None)
            continue
        pause_s = max(0.1, at_s - prompt.at_s) if at_s is not None else _MINUTE_S**2
        pause_s = (_MINUTE_S**2 / pause_s if turned else pause_s) * wrong
        out.append(Hint(Action.RESUME, prompt.at_s + pause_s))
    return out


def pauses(workload: Workload, model: str, sigma: float, answer_s_per_token: float) -> list[float | None]:
    """Return what is announced: in how many seconds from its end each prompt is resumed; None: nothing is announced."""
    ends_s = (prompt.at_s + prompt.answer * answer_s_per_token for prompt in workload.prompts)
    hinted = zip(hints(workload, model, sigma), ends_s, strict=True)
    return [max(0.0, hint.at_s - end_s) if hint is not None else None for hint, end_s in hinted]
