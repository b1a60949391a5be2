"""Random moves: how often each move happens and with which arguments, by seed or by Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from kvpipe.connectors.vllm.trial.arrivals import ANSWER_TOKENS_MAX, DOCUMENT_TOKENS_MAX, DOCUMENTS, OWN_TOKENS_MAX
from kvpipe.connectors.vllm.trial.hints import HINTS
from kvpipe.connectors.vllm.trial.limits import LIMITS
from kvpipe.connectors.vllm.trial.rank import QUIRKS, STOPS
from kvpipe.connectors.vllm.trial.shapes import Shape
from kvpipe.connectors.vllm.trial.trial import Move
from kvpipe.testing.held_tier import TROUBLES

Choices = Sequence[int | bool]
MOVES_PER_TRIAL = 200

_DOCUMENT, _TAKE, _ANSWER = range(DOCUMENTS), range(DOCUMENT_TOKENS_MAX), range(ANSWER_TOKENS_MAX)
_OWN, _APART, _INDEX, _COPIES = (0, 0, 1, 17, OWN_TOKENS_MAX), (0, 0, 0, 1), range(8), range(5)
_EVEN, _SELDOM = (False, True), (False, False, False, True)

ARGUMENTS: dict[str, tuple[Choices, ...]] = {
    "add": (_DOCUMENT, _TAKE, _OWN, _ANSWER, _APART, _APART),
    "follow": (_INDEX, _OWN, _ANSWER),
    "reuse": (_DOCUMENT, _TAKE, _ANSWER),
    "embed": (_DOCUMENT, _TAKE, _OWN, _ANSWER),
    "session": (_DOCUMENT, _TAKE, _ANSWER),
    "more": (_INDEX, _OWN, _ANSWER),
    "end": (_INDEX,),
    "schedule": (),
    "execute": (),
    "update": (),
    "step": (_INDEX,),
    "abort": (_INDEX,),
    "tick": (_COPIES, _COPIES),
    "pace": (range(4), range(4), (*_SELDOM, *[False] * 4)),
    "again": (_INDEX, range(1, 9)),
    "reset": (_EVEN, _EVEN),
    "weights": (range(3),),
    "pause": (range(4), _INDEX),
    "freeze": (_SELDOM,),
    "bypass": (_SELDOM,),
    "later": (_INDEX,),
    "fail": (_INDEX, _EVEN, _INDEX),
    "lose": (_INDEX, _EVEN, _EVEN),
    "quirk": (_INDEX, range(len(QUIRKS)), range(len(QUIRKS))),
    "adapter": (range(3),),
    "hint": (range(len(HINTS)), (0, 1, 5, 50)),
    "limit": (range(len(LIMITS)), (0, 1, 40, 100, DOCUMENT_TOKENS_MAX)),
    "hold": (_EVEN,),
    "trouble": (range(2), (*[0] * 4, *range(len(TROUBLES)))),
    "late": (),
    "operate": (_INDEX, range(3), (0, 1, 40, DOCUMENT_TOKENS_MAX)),
    "dummy": (),
    "drain": (),
    "probe": (),
    "shutdown": (range(len(STOPS)),),
}
"""The choices for each argument of a move. The first choice is the simplest."""

WEIGHTS: dict[str, float] = {
    "add": 10, "follow": 3, "reuse": 1, "embed": 1, "session": 1, "more": 2, "end": 1,
    "schedule": 12, "execute": 10, "update": 12, "step": 16, "abort": 2, "tick": 8,
    "pace": 2, "again": 1, "reset": 1, "pause": 1, "freeze": 1, "bypass": 0.4, "later": 0.6, "fail": 1.5,
    "lose": 1, "quirk": 2.5,
    "adapter": 1.5, "hold": 1.5, "trouble": 1, "late": 0.7,
    "dummy": 0.4,
    "drain": 0.4,
}  # fmt: skip
"""The relative frequency of each move."""
LIMIT = 12
"""The relative frequency of requests with limits, in shapes with `limits`."""
HINT = 8
"""The relative frequency of requests with hints, in shapes with `hints`."""
OPERATE = 8
"""The relative frequency of pins, unpins and evictions by operators, in shapes with `operators`."""
FAIL = 8
"""The relative frequency of failing copies, in shapes in which vLLM ends a request whose load has failed."""

SWARM = (0.3, 1.0, 1.0, 3.0)
"""For each move, a sequence draws one of these factors, by which the frequency of the move is multiplied.

So sequences differ more from each other, and together reach more cells (Groce et al., Swarm Testing, ISSTA 2012).
"""

SHUTDOWNS = 0.1
"""The share of sequences that end with a shutdown while work is in flight."""


def random_moves(seed: int | str, count: int, more: Mapping[str, float] = MappingProxyType({})) -> Iterator[Move]:
    """Yield `count` moves, and then a probe or a shutdown.

    `more` has weights in addition to `WEIGHTS`, or in place of some of `WEIGHTS`.
    """
    made = {**WEIGHTS, **more}
    rng = random.Random(seed)  # noqa: S311
    weights = [weight * rng.choice(SWARM) for weight in made.values()]
    for name in rng.choices(list(made), weights, k=count):
        yield (name, *map(rng.choice, ARGUMENTS[name]))
    yield ("shutdown", rng.randrange(len(STOPS))) if rng.random() < SHUTDOWNS else ("probe",)


def trial_moves(shape: Shape, seed: int) -> Iterator[Move]:
    """Yield the moves of the trial of `shape` with `seed`.

    The moves do not depend on `save_steps`, so that shapes can be compared that differ only in `save_steps`.
    """
    wanted = (
        (shape.hints, "hint", HINT),
        (shape.operators, "operate", OPERATE),
        (shape.fails, "fail", FAIL),
        (shape.limits, "limit", LIMIT),
    )
    more = {move: weight for holds, move, weight in wanted if holds}
    return random_moves(f"{seed} Shape({_fields(shape._replace(save_steps=1))})", MOVES_PER_TRIAL, more)


def _fields(shape: Shape) -> str:
    """Return the fields of `shape` as text.

    Fields after `dense` are included only if they are set. So a new field does not change the moves of other shapes.
    """
    names = shape._fields
    first, default = names.index("dense") + 1, shape._field_defaults
    shown = names[:first] + tuple(name for name in names[first:] if getattr(shape, name) != default[name])
    return ", ".join(f"{name}={getattr(shape, name)!r}" for name in shown)


def show(move: Move) -> str:
    """Return a move in a form that is easy to read."""
    return " ".join([str(move[0]), *(str(int(one)) if isinstance(one, bool) else str(one) for one in move[1:])])
