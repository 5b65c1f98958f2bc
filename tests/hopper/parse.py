"""PTX text -> instructions."""

import re
from dataclasses import dataclass

OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
COMMENT = re.compile(r"//.*|/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    name: str  # with its modifiers, e.g. add.s32
    operands: tuple[str | tuple[str, ...], ...]  # vectors in braces are tuples
    guard: str = ""  # predicate register, "" for none
    negated: bool = False
    line: int = 0

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.name} {self.operands}"


@dataclass(frozen=True)
class Program:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # where each points
    parameters: tuple[str, ...]  # their types, u64, u32, ...


def parse(text: str) -> Program:
    """One kernel."""
    head, _, body = text.partition("{\n")
    parameters = tuple(re.findall(r"\.param\s+\.(\w+)", head))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    start = head.count("\n") + 1
    for number, line in enumerate(body.splitlines(), start + 1):
        line = COMMENT.sub("", line).strip()
        if line.startswith("}"):
            break
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            parts = filter(None, map(str.strip, line.split(";")))
            instructions += [instruction(part, number) for part in parts]
    return Program(tuple(instructions), labels, parameters)


def instruction(text: str, line: int) -> Instruction:
    guard, negated = "", False
    if text.startswith("@"):
        guard, text = text[1:].split(None, 1)
        negated, guard = guard.startswith("!"), guard.lstrip("!")
    name, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
    operands = tuple(
        tuple(p.strip() for p in part[1:-1].split(",")) if part.startswith("{") else part
        for part in OPERAND.findall(rest)
    )
    return Instruction(name.strip(), operands, guard, negated, line)


def immediate(text: str) -> int | None:
    """The bits of a number: decimal, hexadecimal, or the bits of a float; None for anything else."""
    if text.startswith(("0f", "0F", "0d", "0D")):
        return int(text[2:], 16)
    try:
        return int(text.removesuffix("U"), 0)
    except ValueError:
        return None
