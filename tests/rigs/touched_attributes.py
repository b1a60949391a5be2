"""Records which thread touches which attribute while code runs, for tests of the `SHARED` lists.

The attributes of instances of the given classes are watched. Three things are recorded: reads, writes after the object
was made, and containers that differ when another thread reads them. Writes in an object's constructor are not recorded,
because no other thread can use the object before the constructor returns.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pydantic
import pytest

_Content = tuple[Any, ...] | bytes | None
"""The items of a container and of its inner containers. None: the value is not a container."""

_DEPTH: Final = 3
"""The depth up to which containers in containers are compared."""
_ABSENT: Final = object()
_UNCHANGING: Final = (tuple, Enum, BaseException, pydantic.BaseModel, msgspec.Struct)


def classes_of(*names: str) -> Iterator[type]:
    """Yield the classes of the modules and packages `names`, except records that never change."""
    for name in names:
        package = import_module(name)
        inside = [f"{name}.{one.name}" for one in iter_modules(getattr(package, "__path__", ()))]
        for module in (package, *map(import_module, inside)):
            for one in vars(module).values():
                mine = isinstance(one, type) and one.__module__ == module.__name__
                if mine and not issubclass(one, _UNCHANGING) and not getattr(one, "_is_protocol", False):
                    yield one


class _Look(NamedTuple):
    """The content of a container when a thread has last read it."""

    owner: object
    """The object that has the container. This reference prevents that another object gets the same id."""
    role: Hashable
    content: _Content


class AttributeWatch:
    """Records touched attributes, as `Class.attribute`, by the role of the thread that touches them."""

    def __init__(self, role: Callable[[], Hashable]) -> None:
        """Start without touches.

        `role` returns the role of the calling thread, or None for a thread that is not watched.
        """
        self._role = role
        self._touched: dict[Hashable, set[str]] = {}
        self._written: dict[Hashable, set[str]] = {}
        self._names: dict[tuple[type, str], str] = {}
        self._changed: set[str] = set()
        self._looks: dict[tuple[int, str], _Look] = {}
        """The last look at each container, by the id of the object that has it and the attribute's name."""

    def watch(self, classes: Iterable[type], patch: pytest.MonkeyPatch) -> None:
        """Watch the instances of `classes` until `patch` is undone.

        A base class without attributes names no attribute.
        """
        every = {one for one in classes if vars(one).get("__slots__") != ()}
        for one in every:
            if every.isdisjoint(one.__mro__[1:]):
                self._watch(one, patch)

    def _watch(self, owner: type, patch: pytest.MonkeyPatch) -> None:
        read: Any = owner.__getattribute__
        write: Any = owner.__setattr__

        def reading(one: object, name: str) -> Any:
            value = read(one, name)
            role = self._role()
            if role is not None and (touched := self._named(owner, type(one), name)):
                self._touched.setdefault(role, set()).add(touched)
                if touched not in self._changed:
                    self._look(role, one, touched, value)
            return value

        def writing(one: object, name: str, value: object) -> None:
            role = self._role()
            if role is not None and not _is_made_by(sys._getframe(1), one):
                touched = self._named(owner, type(one), name)
                self._touched.setdefault(role, set()).add(touched)
                self._written.setdefault(role, set()).add(touched)
            write(one, name, value)

        patch.setattr(owner, "__getattribute__", reading)
        patch.setattr(owner, "__setattr__", writing)

    def _named(self, watched: type, owner: type, name: str) -> str:
        """Return `Class.name` for an attribute, and "" for a method.

        `Class` is the class that declares the slot. For an attribute without a slot, it is the highest watched base
        class.
        """
        known = self._names.get((owner, name))
        if known is None:
            static = inspect.getattr_static(owner, name, _ABSENT)
            made = inspect.isfunction(static) or isinstance(static, property | classmethod | staticmethod)
            made |= inspect.ismethoddescriptor(static) or name.startswith("__")
            has_slot = inspect.ismemberdescriptor(static)
            holder = next(one for one in owner.__mro__ if name in vars(one)) if has_slot else watched
            known = self._names[owner, name] = "" if made else f"{holder.__name__}.{name}"
        return known

    def _look(self, role: Hashable, one: object, touched: str, value: object) -> None:
        """If `value` is a container, compare its content with the content that another thread read last."""
        last = self._looks.get((id(one), touched))
        if last is not None and last.role == role:
            return
        content = content_of(value)
        if content is None:
            return
        if last is not None and not same(content, last.content):
            self._changed.add(touched)
        self._looks[id(one), touched] = _Look(one, role, content)

    def shared(self, one: Hashable, other: Hashable) -> set[str]:
        """Return the attributes that both roles touch, and that one role has written or whose content has changed."""
        both = self._touched.get(one, set()) & self._touched.get(other, set())
        return both & (self._written.get(one, set()) | self._written.get(other, set()) | self._changed)


def _is_made_by(frame: FrameType | None, one: object) -> bool:
    """Return whether the constructor of `one` is running now, in this call or in a caller."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is one:
            return True
        frame = frame.f_back
    return False


def content_of(value: object, depth: int = _DEPTH) -> _Content:
    """Return the items of a container and of its inner containers.

    None: not a container, or a tuple without containers.
    """
    if isinstance(value, np.ndarray | memoryview | bytearray):
        return bytes(value)
    if isinstance(value, tuple):
        inside = [content_of(one, depth - 1) for one in value] if depth else []
        return tuple(inside) if any(one is not None for one in inside) else None
    if not isinstance(value, dict | list | set | deque):
        return None
    pairs = list(value.items()) if isinstance(value, Mapping) else [(one, None) for one in value.copy()]
    return tuple(
        (key, one, content_of(key if one is None else one, depth - 1) if depth else None) for key, one in pairs
    )


def same(one: Any, other: Any) -> bool:
    """Return whether two contents have the same objects in the same order."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, bytes) and one == other)
