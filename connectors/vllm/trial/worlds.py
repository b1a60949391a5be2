"""Worlds: a world has one value of every axis of a configuration.

Worlds are drawn at random, so that no combination is forgotten.

A world's name lists the values that are not the first value of their axis, as in `world: scheduler=async failure=fail`.
The name is sufficient to build the shape again.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from kvpipe.connectors.vllm.trial.shapes import BLOCK, CONSUMER, PRODUCER, SHAPES, Shape

PREFIX: Final = "world:"
WORLDS: Final = 100
DrawnWorld = tuple[tuple[str, str], ...]
"""(axis, value) for every axis, in the order of `AXES`."""

_TWO: Final[dict[str, Any]] = {"windows": (None, 2 * BLOCK), "blocks": 24}
_STATES: Final[dict[str, Any]] = {"windows": (None, None), "states": (1,), "blocks": 24}
_DRAFTER: Final[dict[str, Any]] = {"drafts": 3, "drafter": True}
AXES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "scheduler": {"sync": {}, "async": {"asynchronous": True}},
    "failure": {"recompute": {}, "fail": {"fails": True}},
    "load": {"auto": {}, "sync": {"load": "sync"}, "async": {"load": "async"}},
    "groups": {
        "one": {},
        "window": {"windows": (2 * BLOCK,)},
        "hybrid": _TWO,
        "local": {"windows": (None, 3 * BLOCK), "locals": (1,), "blocks": 24},
        "block-sizes": _TWO | {"sizes": (2 * BLOCK, BLOCK)},
        "hash-blocks": _TWO | {"hashes": BLOCK // 2},
        "tails": {"windows": (None, BLOCK), "sizes": (2 * BLOCK, BLOCK // 2), "blocks": 24},
        "states": _STATES,
        "states-within-blocks": _STATES | {"hashes": BLOCK // 4},
        "exported-states": _STATES | {"hashes": BLOCK // 4, "exports": BLOCK // 2},
        "window-and-states": {"windows": (None, 2 * BLOCK, None), "states": (2,), "blocks": 36},
    },
    "runner": {"v1": {}, "v2": {"v2": True}},
    "mode": {
        "layerwise": {},
        "step": {"mode": "step"},
        "auto": {"mode": "auto"},
        "whole-blocks": {"mode": "step", "cross": True, "layers_per_group": 4},
    },
    "ranks": {
        "one": {},
        "two": {"ranks": 2},
        "pipeline": {"ranks": 2, "stages": 2, "layers_per_group": 4},
        "context": {"ranks": 2, "dcp": 2},
        "pipeline-of-context": {"ranks": 4, "stages": 2, "layers_per_group": 4, "dcp": 2},
    },
    "drafts": {
        "none": {},
        "ngram": {"drafts": 3},
        "drafter": _DRAFTER,
        "masks": _DRAFTER | {"masks": 3},
        "more-masks": _DRAFTER | {"masks": 4},
        "undropped-masks": _DRAFTER | {"masks": 3, "undropped": True},
    },
    "reports": {"last": {}, "deferred": {"deferred": True}},
    "hooks": {
        "all": {},
        "device": {"device": True},
        "graphs": {"graphs": True},
        "unhooked": {"layers_per_group": 4, "unhooked": 2},
    },
    "tiers": {"none": {}, "one": {"tiers": 1}, "two": {"tiers": 2}, "slow": {"tiers": 1, "slow": True}},
    "role": {"both": {}, "producer": {"role": PRODUCER}, "consumer": {"role": CONSUMER}},
    "eviction": {"lru": {}, "s3fifo": {"policy": "s3fifo"}, "sessions": {"policy": "sessions"}},
    "pool": {"small": {"pool_slots": 6}, "large": {"pool_slots": 24}, "fresh": {"pool_slots": 12, "fresh": True}},
    "order": {
        "fcfs": {},
        "priorities": {"priorities": True},
        "long-prefills": {"long_prefills": 2 * BLOCK},
        "both": {"priorities": True, "long_prefills": 2 * BLOCK},
    },
    "states": {"sparse": {}, "dense": {"dense": True}, "branches": {"branches": True}},
    "events": {"off": {}, "on": {"events": True}},
    "clients": {"plain": {}, "hints": {"hints": True}, "resumes": {"hints": True, "resumes": True}},
    "operators": {"none": {}, "pins": {"operators": True}, "warms": {"operators": True, "warms": True}},
    "tenants": {"equal": {}, "quotas": {"quotas": True}},
    "beside": {"alone": {}, "sibling": {"sibling": True}},
    "saved": {
        "answers": {},
        "prompts": {"answers": False},
        "grouped": {"save_steps": 4},
        "every-step": {"save_steps": 1},
    },
}
"""By axis and value: the fields of a shape that the value sets. The first value of an axis is the simplest."""

_STAGED, _DIVIDED = "pipeline pipeline-of-context", "context pipeline-of-context"
_STATEFUL = "states states-within-blocks exported-states window-and-states"
_FED = "masks more-masks undropped-masks"
_DRAFTERS = f"drafter {_FED}"
_DRAFTS = f"ngram {_DRAFTERS}"
_SEVERAL = f"window hybrid local block-sizes hash-blocks tails {_STATEFUL}"
CONFLICTS: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("kvpipe refuses sync loads of several groups or windows", {"load": "sync", "groups": _SEVERAL}),
    ("kvpipe refuses sync loads between stages", {"load": "sync", "ranks": _STAGED}),
    ("kvpipe refuses drafts between stages", {"ranks": _STAGED, "drafts": _DRAFTS, "scheduler": "sync"}),
    ("kvpipe refuses drafts between stages", {"ranks": _STAGED, "drafts": _DRAFTS, "runner": "v1"}),
    ("kvpipe refuses layerwise copies of a drafter", {"mode": "layerwise", "drafts": _DRAFTERS}),
    ("kvpipe refuses a divided drafter", {"ranks": _DIVIDED, "drafts": _DRAFTERS, "runner": "v1"}),
    ("kvpipe refuses local attention of divided blocks", {"groups": "local", "ranks": _DIVIDED}),
    ("kvpipe refuses states with n-gram drafts", {"groups": _STATEFUL, "drafts": "ngram"}),
    (
        "kvpipe refuses states of answers that a stage lacks",
        {"groups": _STATEFUL, "drafts": _DRAFTERS, "ranks": _STAGED, "states": "dense"},
    ),
    (
        "vLLM's own events leave out blocks that it does not keep",
        {"events": "on", "groups": f"local tails {_STATEFUL}"},
    ),
    ("vLLM's local attention has no drafter that is fed context", {"groups": "local", "drafts": _FED}),
    ("a producer without a tier has no consumer", {"role": "producer consumer", "tiers": "none"}),
    ("nothing is fetched without a tier", {"operators": "warms", "tiers": "none"}),
)
"""Combinations that no engine has, each with the reason.

A world conflicts if it has one of the listed values of every listed axis.
"""
AxisPair = tuple[str, str]
"""Two values of different axes, each as `axis=value`, in the order of `AXES`."""
CANDIDATES = 6
"""The number of worlds that are drawn for each trial. The world with the most new pairs is tried."""


def _of_axis() -> dict[str, list[dict[str, frozenset[str]]]]:
    """Return, for each axis, the conflicts that list a value of the axis."""
    found: dict[str, list[dict[str, frozenset[str]]]] = {axis: [] for axis in AXES}
    for _, one in CONFLICTS:
        for axis in one:
            found[axis].append({other: frozenset(values.split()) for other, values in one.items()})
    return found


_CONFLICTS: Final = _of_axis()


def _fits(world: Mapping[str, str], axis: str) -> bool:
    """Whether the value of `axis` in `world` conflicts with no value of another axis."""
    return not any(all(world.get(other) in values for other, values in one.items()) for one in _CONFLICTS[axis])


def draw(rng: random.Random, given: Mapping[str, str] = MappingProxyType({})) -> DrawnWorld | None:
    """Return a world with the values `given`, or None if no world has these values.

    The other values are drawn axis by axis, so that each value fits the values drawn before.
    """
    for _ in range(8):  # a value that fits two axes may fit no value of a third axis
        world = dict(given)
        for axis in sorted(AXES, key=lambda _: rng.random()):
            values = [world[axis]] if axis in world else list(AXES[axis])
            fit = [value for value in values if _fits(world | {axis: value}, axis)]
            if not fit:
                break
            world[axis] = rng.choice(fit)
        else:
            return tuple((axis, world[axis]) for axis in AXES)
    return None


def pairs(world: DrawnWorld) -> Iterator[AxisPair]:
    """Yield the pairs of values of a world."""
    return itertools.combinations((f"{axis}={value}" for axis, value in world), 2)


@functools.cache
def possible() -> frozenset[AxisPair]:
    """Return every pair of values that occurs together in at least one world."""
    rng, found = random.Random(0), set[AxisPair]()  # noqa: S311
    for axis, other in itertools.combinations(AXES, 2):
        for value, beside in itertools.product(AXES[axis], AXES[other]):
            if (f"{axis}={value}", f"{other}={beside}") not in found:
                world = draw(rng, {axis: value, other: beside})
                found.update(pairs(world) if world is not None else ())
    return frozenset(found)


def covering(rng: random.Random, reached: Collection[AxisPair] = ()) -> Iterator[DrawnWorld]:
    """Yield worlds without end.

    If possible, each world has a pair of values that is neither in `reached` nor in an earlier world. When no new pair
    is left, all pairs count as new again.
    """
    left = set(possible() - set(reached))
    while True:
        left = left or set(possible())
        first = min(left, key=lambda _: rng.random())
        given = dict(one.split("=") for one in first)
        drawn = [world for world in (draw(rng, given) for _ in range(CANDIDATES)) if world is not None]
        best = max(drawn, key=lambda world: len(left.intersection(pairs(world))))
        left.difference_update(pairs(best))
        yield best


@functools.cache
def default_worlds() -> tuple[DrawnWorld, ...]:
    """Return the `WORLDS` worlds of the default profile. Together they have every possible pair."""
    return tuple(itertools.islice(covering(random.Random(0)), WORLDS))  # noqa: S311


def shape_of(world: DrawnWorld) -> Shape:
    """Return the shape with the fields that the values of a world set."""
    fields: dict[str, Any] = {}
    for axis, value in world:
        fields |= AXES[axis][value]
    shape = Shape(**fields)
    if shape.unhooked:
        shape = shape._replace(layers_per_group=max(4, shape.layers_per_group))
    if shape.states and shape.drafter:
        shape = shape._replace(blocks=shape.blocks + 12)
    if shape.states and shape.masks:  # vLLM puts a fed drafter into a cache group of its own
        shape = shape._replace(windows=(*shape.windows, None), blocks=shape.blocks + 12)
    if min(shape.sizes, default=BLOCK) < BLOCK and (shape.stages > 1 or shape.masks):  # vLLM reserves more blocks
        shape = shape._replace(blocks=shape.blocks + 12)
    if shape.states and shape.dcp > 1:  # a block of attention has the tokens of `dcp` blocks of states
        sizes = (BLOCK if i in shape.states or window else shape.dcp * BLOCK for i, window in enumerate(shape.windows))
        shape = shape._replace(sizes=tuple(sizes))
    return shape._replace(failing=may_fail(shape))


def may_fail(shape: Shape) -> bool:
    """Whether loads may fail.

    vLLM computes wrong answers after a failed sync load in two cases: with its asynchronous scheduler, and with a
    drafter that has its own KV.
    """
    waits = shape.load == "async" or shape.stages > 1 or len(shape.windows) > 1 or shape.windows[0] is not None
    return waits or shape.fails or not (shape.asynchronous or shape.drafter)


def name_of(world: DrawnWorld) -> str:
    """Return the name of a world."""
    return " ".join((PREFIX, *(f"{axis}={value}" for axis, value in world if value != next(iter(AXES[axis])))))


def shape_named(name: str) -> Shape:
    """Return the shape with this name, or the shape of the world with this name.

    Raises:
        KeyError: no shape has the name.

    """
    if not name.startswith(PREFIX):
        return SHAPES[name]
    return shape_of(world_named(name))


def world_named(name: str) -> DrawnWorld:
    """Return the world with this name, which begins with `PREFIX`."""
    given = dict(part.split("=") for part in name.removeprefix(PREFIX).split())
    return tuple((axis, given.get(axis, next(iter(values)))) for axis, values in AXES.items())
