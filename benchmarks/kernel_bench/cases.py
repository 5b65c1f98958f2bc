"""What is measured: shapes, and a record for every row of the table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Call = Callable[[Tensors], Tensors]  # inputs by name -> outputs by name, the first is what is timed


class Passes(NamedTuple):
    """A count for the forward pass, and for forward and backward together."""

    forward: float
    both: float


@dataclass(frozen=True)
class Tokens:
    """B sequences of T tokens. states: also draw the states that the sequences begin with."""

    batch: int
    tokens: int
    heads: int = 8
    features: int = 128  # F
    values: int = 128  # V
    states: bool = False
    hidden: int = 256  # D, of memories with two layers

    unit, scale = "Mtok/s", 1e6

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def count(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class Matrices:
    """So many matrices of [rows, columns]."""

    number: int
    rows: int
    columns: int

    unit, scale = "Mmat/s", 1e6

    @property
    def label(self) -> str:
        return f"{self.number}x{self.rows}x{self.columns}"

    @property
    def count(self) -> int:
        return self.number


@dataclass(frozen=True)
class Streams:
    """Steps of so many streams, each of which has read `position` tokens."""

    batch: int
    position: int
    steps: int = 1

    unit, scale = "ktok/s", 1e3

    @property
    def label(self) -> str:
        return f"{self.batch} at {self.position:,}"

    @property
    def count(self) -> int:
        return self.batch * self.steps


Shape = Tokens | Matrices | Streams


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row for each of its shapes."""

    name: str
    group: str  # what --only picks, besides names
    shapes: tuple[Shape, ...]
    draw: Callable[
        [Any, torch.device], Tensors
    ]  # for a shape: inputs by name, those with gradients marked
    call: Call
    flops: Callable[[Any], Passes]  # the least that the algorithm multiplies and adds
    bytes: Callable[[Any], Passes]  # the least that it moves
    small: Shape | None = None  # where it is checked
    plain: Call | None = None  # the yardstick: the same in PyTorch, in the same dtype
    truth: Call | None = None  # the same in fp64
    caution: Callable[[], str | None] = lambda: None  # why a peer cannot be checked here
    base: str | None = None  # the row that ratios are against
    base_shape: Shape | None = None  # where that row stands; None: at the same shape
    dtype: torch.dtype = torch.bfloat16  # whose matrix rate bounds it
    backward: bool = True
    release: Callable[[], None] = lambda: (
        None
    )  # at the end: let go of what `draw` keeps besides inputs
    peer: bool = False  # of another project: what fails its check is timed, and marked


def pick(cases: Iterable[Case], names: list[str] | None) -> list[Case]:
    """The cases of these names or groups, in the order of the registry; None: all."""
    cases = list(cases)
    if names is None:
        return cases
    known = dict.fromkeys(label for case in cases for label in (case.group, case.name))
    for name in names:
        if name not in known:
            raise ValueError(f"no case or group {name!r}, wanted some of {', '.join(known)}")
    return [case for case in cases if case.group in names or case.name in names]


def reshape(case: Case, shapes: list[tuple[int, int]] | None) -> Case:
    """The case at other batches and tokens; cases of another kind keep their shapes."""
    first = case.shapes[0]
    if shapes is None or not isinstance(first, Tokens):
        return case
    return replace(case, shapes=tuple(replace(first, batch=b, tokens=t) for b, t in shapes))
