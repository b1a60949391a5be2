"""Models of the hints that clients send about their sessions. The hints are right, nearly right, or wrong."""

from __future__ import annotations

import math
import random
from typing import Final

from benchmarks.replay.workload import Workload
from kvpipe.cache.policy.hints import Action, Hint

NONE: Final = "none"
RESUME: Final = "resume"
"""Each hint announces when the session resumes: when a prompt comes that begins with at least half of this prompt.

The announced pause is the real pause times a random log-normal factor. Prompts that are not resumed get no hint.
"""
ADVERSARIAL: Final = "adversarial"
"""The hints are wrong: short pauses are announced as long pauses, and long pauses as short pauses (3600 s² / pause).
Prompts that are not used again are announced to be resumed in 1 s."""
TURNED: Final = "turned"
"""The first half of all prompts have the hints of `RESUME`. The second half have the hints of `ADVERSARIAL`."""
CONSTANT: Final = "constant"
"""Each prompt is announced to be resumed in 1 s."""
DEAD: Final = "dead"
"""Prompts that are not used again are announced to be resumed in 10 minutes. All other prompts get no hint."""
MODELS: Final = (NONE, RESUME, ADVERSARIAL, TURNED, CONSTANT, DEAD)
_MINUTE_S: Final = 60.0


def resumes(workload: Workload) -> list[float | None]:
    """Return, for each prompt, when the next prompt arrives that begins with at least half of this prompt, in seconds.

    The value is None if no such prompt arrives.
    """
    out, later = list[float | None](), dict[bytes, float]()
    for prompt in reversed(workload.prompts):
        keys = prompt.keys
        out.append(later.get(keys[len(keys) // 2]) if keys else None)
        later.update(dict.fromkeys(keys, prompt.at_s))
    return out[::-1]


def hints(workload: Workload, model: str, sigma: float, seed: int = 0) -> list[Hint | None]:
    """Return the hint that comes with each prompt. `sigma` is the standard deviation of the pause's logarithm."""
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
    """Return, for each prompt, the announced seconds from its end to its resume, or None without announcement."""
    ends_s = (prompt.at_s + prompt.answer * answer_s_per_token for prompt in workload.prompts)
    hinted = zip(hints(workload, model, sigma), ends_s, strict=True)
    return [max(0.0, hint.at_s - end_s) if hint is not None else None for hint, end_s in hinted]
