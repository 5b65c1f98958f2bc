"""From instructions to code: every operand, immediates too, becomes a place in a list of registers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.hopper.machine import ALL, BASE, LANES, Code, Fault, Lanes, Warp
from tests.hopper.parse import Instruction, Program, immediate

REGISTERS = {"r": np.uint32, "f": np.uint32, "rd": np.uint64, "fd": np.uint64, "rs": np.uint16}
REGISTERS |= {"h": np.uint16, "p": np.bool_}
Maker = Callable[["Decoder", Instruction], Code]


class Decoder:
    """The code of a program. makers: how to make it, by the first word of an instruction"""

    def __init__(self, program: Program, makers: Mapping[str, Maker]) -> None:
        self.program, self.makers = program, makers
        self.places: dict[tuple[str, Any], int] = {}
        self.registers: list[Lanes] = []
        self.code: list[Code] = [self._decode(i) for i in program.instructions]

    def place(self, operand: str, kind: Any) -> int:
        """Where an operand stands; an immediate as a number of that kind."""
        register = re.fullmatch(r"%([a-z]+)\d+", operand)
        key = (operand, None if register else kind)
        if key not in self.places:
            self.places[key] = len(self.registers)
            zero = register and np.zeros(LANES, REGISTERS[register[1]])
            self.registers.append(self._constant(operand, kind) if zero is None else zero)
        return self.places[key]

    def address(self, operand: str, kind: Any) -> tuple[int, int]:
        """Register and offset of [register + offset]."""
        register, _, offset = operand[1:-1].replace(" ", "").partition("+")
        return self.place(register, kind), int(offset or "0", 0)

    def guard(self, i: Instruction) -> Callable[[Warp], Lanes]:
        """Which lanes take part."""
        if not i.guard:
            return lambda w: ALL
        at = self.place(i.guard, np.bool_)
        if i.negated:
            return lambda w: ~w.registers[at]
        return lambda w: w.registers[at]

    def _constant(self, operand: str, kind: Any) -> Lanes:
        if operand == "global_smem":
            return np.full(LANES, BASE, kind)
        if operand == "_":  # a result that nobody wants
            return np.zeros(LANES, kind)
        bits = immediate(operand)
        if bits is None:
            raise Fault(f"operand {operand} is not known")
        if kind is np.bool_:
            return np.full(LANES, bits != 0)
        return np.full(LANES, bits & (2 ** (8 * np.dtype(kind).itemsize) - 1), kind)

    def _decode(self, i: Instruction) -> Code:
        base = i.name.split(".")[0]
        make = self.makers.get(base)
        if make is None:
            raise Fault(f"the emulator does not know {i}")
        return make(self, i)

    def writes(self, i: Instruction, targets: list[int], compute: Callable[[Warp], Any]) -> Code:
        """Write what is computed, one result or a list, to registers, where the guard allows it."""
        if not i.guard:
            if len(targets) == 1:
                [target] = targets

                def run(w: Warp) -> None:
                    w.registers[target] = compute(w)

                return run

            def run_all(w: Warp) -> None:
                for target, value in zip(targets, compute(w), strict=True):
                    w.registers[target] = value

            return run_all
        guard = self.guard(i)

        def run_guarded(w: Warp) -> None:
            mask, found = guard(w), compute(w)
            for target, value in zip(targets, found if len(targets) > 1 else [found], strict=True):
                w.registers[target] = np.where(mask, value, w.registers[target])

        return run_guarded

    def function(self, i: Instruction, function: Callable[..., Any], kinds: list[Any]) -> Code:
        """A pure function of the operands behind the first; kinds: of each, for immediates."""
        target, *sources = i.operands
        at = [self.place(str(s), k) for s, k in zip(sources, kinds, strict=True)]
        to = self.place(str(target), kinds[0])
        if i.guard or len(at) > 2:
            return self.writes(i, [to], lambda w: function(*[w.registers[x] for x in at]))
        first, last = at[0], at[-1]

        def one(w: Warp) -> None:
            w.registers[to] = function(w.registers[first])

        def two(w: Warp) -> None:
            w.registers[to] = function(w.registers[first], w.registers[last])

        return one if len(at) == 1 else two
