"""An interpreter for the PTX code of the copy kernel.

The interpreter runs 256 lanes at a time and checks every memory access. The interpreter knows the instructions of that
kernel, and raises LookupError for other instructions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]
LANES: Final = 256
FILL: Final = 0xEE


class Memory:
    """Device and host memory. Only allocated bytes may be accessed."""

    def __init__(self, base: int, size: int) -> None:
        """`base` is the address of the first byte."""
        self.base, self.bytes = base, np.full(size, FILL, np.uint8)
        self.stored = 0
        self._ranges: list[tuple[int, int]] = []
        self._next = base

    def allocate(self, content: npt.NDArray[Any], align: int = 256) -> int:
        """Return the address of a copy of `content`, with a gap behind it."""
        address = -(-self._next // align) * align
        self._next = address + content.nbytes + align
        self._ranges.append((address, address + content.nbytes))
        self.view(address, content.nbytes)[:] = np.ascontiguousarray(content).view(np.uint8).ravel()
        return address

    def view(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes at `address`."""
        return self.bytes[address - self.base : address - self.base + size]

    def places(self, addresses: Lanes, size: int) -> Lanes:
        """Return the offsets in memory of accesses of `size` bytes. Raises AssertionError for a forbidden access."""
        assert not (addresses % size).any(), f"an access of {size} bytes is not aligned"
        allowed = np.zeros(len(addresses), bool)
        for low, high in self._ranges:
            allowed |= (addresses >= low) & (addresses + size <= high)
        assert allowed.all(), f"an access of {size} bytes at {int(addresses[~allowed][0]):#x} is outside"
        return (addresses - self.base)[:, None] + np.arange(size)


class Instruction(NamedTuple):
    """One instruction: the predicate (or ""), the operation, and the operands as text."""

    predicate: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The operands."""
        return [one.strip() for one in self.rest.split(",")]


def _signed(value: Lanes) -> Lanes:
    return value.astype(np.uint64).astype(np.uint32).astype(np.int32).astype(np.int64)


def _unsigned(value: Lanes) -> Lanes:
    return (value.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _divide(a: Lanes, b: Lanes) -> Lanes:
    a, b = _signed(a), _signed(b)
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))  # type: ignore[no-any-return]


OPERATIONS: Final[dict[str, Callable[..., Lanes]]] = {
    "mov": lambda a: a,
    "cvta": lambda a: a,
    "cvt.s64.s32": _signed,
    "cvt.u64.u32": _unsigned,
    "cvt.u32.u64": lambda a: a,
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "mul.wide.s32": lambda a, b: _signed(a) * _signed(b),
    "mad.wide.s32": lambda a, b, c: _signed(a) * _signed(b) + c,
    "mul.lo": operator.mul,
    "mad.lo": lambda a, b, c: a * b + c,
    "shl": operator.lshift,
    "shr.s32": lambda a, b: _signed(a) >> b,
    "shr.u32": lambda a, b: _unsigned(a) >> b,
    "shr.s64": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "div.s32": _divide,
    "rem.s32": lambda a, b: _signed(a) - _divide(a, b) * _signed(b),
    "min.s32": lambda a, b: np.minimum(_signed(a), _signed(b)),
    "max.s32": lambda a, b: np.maximum(_signed(a), _signed(b)),
}
"""The functions that carry out operations, by the beginning of the operation's name."""
WIDE: Final = ("cvt.s64", "cvt.u64", "mul.wide", "mad.wide")
COMPARISONS: Final = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


class Kernel:
    """A kernel that the interpreter can run."""

    def __init__(self, ptx: str) -> None:
        """`ptx` is the text of a module with one kernel."""
        self._code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for raw in ptx[ptx.index("$L__func_begin0:") : ptx.index("$L__func_end0:")].splitlines():
            line = re.sub(r"//.*", "", raw).strip()
            if label := re.match(r"^(\$\S+):(.*)$", line):
                self._labels[label[1]], line = len(self._code), label[2].strip()
            if not line.startswith((".loc", ".reg")):
                self._code += [_instruction(one.strip()) for one in line.strip("{}").split(";") if one.strip()]

    def run(self, memory: Memory, grid: int, *parameters: int) -> None:
        """Run `grid` programs one after another. The last parameters, which Triton adds, are 0."""
        for program in range(grid):
            _Program(self._code, self._labels, memory, parameters, program, grid).run()


def _instruction(text: str) -> Instruction:
    predicate = ""
    if found := re.match(r"^(@!?%p\d+)\s+(.*)$", text):
        predicate, text = found[1], found[2]
    operation, *rest = text.split(None, 1)
    return Instruction(predicate, operation, rest[0] if rest else "")


class _Program:
    """One running program: its registers and its next instruction."""

    def __init__(
        self, code: list[Instruction], labels: dict[str, int], memory: Memory, parameters: tuple[int, ...],
        number: int, grid: int,
    ) -> None:  # fmt: skip
        self._code, self._labels, self._memory, self._parameters = code, labels, memory, parameters
        self._registers: dict[str, Lanes] = {
            "%tid.x": np.arange(LANES), "%ctaid.x": np.full(LANES, number), "%nctaid.x": np.full(LANES, grid),
        }  # fmt: skip

    def run(self) -> None:
        at = 0
        while at < len(self._code):
            one, at = self._code[at], at + 1
            mask = self._mask(one.predicate)
            if one.operation.startswith("bra"):
                assert mask.all() or not mask.any(), "lanes go different ways"
                at = self._labels[one.rest] if mask.all() else at
            elif one.operation == "ret":
                return
            elif one.operation.startswith("ld.param"):
                target, source = one.operands
                number = int(re.findall(r"param_(\d+)", source)[0])
                value = self._parameters[number] if number < len(self._parameters) else 0
                self._registers[target] = np.full(LANES, value)
            elif one.operation.startswith(("ld.global", "st.global")):
                self._access(one, mask)
            else:
                assert mask.all(), f"{one.operation} has a predicate"
                with np.errstate(over="ignore"):
                    self._compute(one)

    def _mask(self, predicate: str) -> Lanes:
        if not predicate:
            return np.ones(LANES, bool)
        mask = self._registers[predicate.lstrip("@!")].astype(bool)
        return ~mask if "!" in predicate else mask

    def _value(self, name: str) -> Lanes:
        return self._registers[name] if name.startswith("%") else np.full(LANES, int(name, 0))

    def _access(self, one: Instruction, mask: Lanes) -> None:
        registers = [name.strip() for name in re.findall(r"\{([^}]*)\}", one.rest)[0].split(",")]
        base, offset = re.findall(r"\[\s*(%\w+)\s*\+\s*(-?\d+)\s*\]", one.rest)[0]
        word = 4 if one.operation.endswith("32") else 8
        places = self._memory.places((self._registers[base] + int(offset))[mask], word * len(registers))
        for number, name in enumerate(registers):
            part = places[:, number * word : (number + 1) * word]
            if one.operation.startswith("ld"):
                made = self._registers.get(name, np.zeros(LANES, np.int64)).copy()
                made[mask] = np.ascontiguousarray(self._memory.bytes[part]).view(f"<i{word}").ravel()
                self._registers[name] = made
            else:
                self._memory.bytes[part] = self._registers[name][mask].astype("<i8")[:, None].view(np.uint8)[:, :word]
                self._memory.stored += part.size

    def _compute(self, one: Instruction) -> None:
        target, *operands = one.operands
        if one.operation.startswith("selp"):
            then, otherwise, chosen = operands
            self._registers[target] = np.where(self._registers[chosen], self._value(then), self._value(otherwise))
            return
        values = [self._value(name) for name in operands]
        if one.operation.startswith("setp"):
            first, second = values if "64" in one.operation else map(_signed, values)
            self._registers[target] = COMPARISONS[one.operation.split(".")[1]](first, second)
            return
        name = next((name for name in OPERATIONS if one.operation.startswith(name)), None)
        if name is None:
            raise LookupError(f"the interpreter knows no instruction {one.operation} {one.rest}")
        made = OPERATIONS[name](*values)
        wide = one.operation.startswith(WIDE) or (one.operation != "cvt.u32.u64" and "64" in one.operation)
        self._registers[target] = made if wide else _signed(made)
