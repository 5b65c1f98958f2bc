"""What one block keeps of a stream, as one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from atlas_lm.memory.spec import MemorySpec
from atlas_lm.memory.state import MemoryState

GROWING = ("attention.k", "attention.v")  # newest last; full attention keeps all of a stream


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """A memory, and the tails of convolutions and attention by name, each [B, ...]."""

    memory: MemoryState | None = None
    tails: dict[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerState":
        memory = None if self.memory is None else self.memory.map(change)
        return LayerState(memory=memory, tails={n: change(t) for n, t in self.tails.items()})

    def to(self, *args: Any, **kwargs: Any) -> "LayerState":
        """Move or cast like Tensor.to; positions stay int64."""

        def move(tensor: Tensor) -> Tensor:
            moved = tensor.to(*args, **kwargs)
            return moved if tensor.is_floating_point() else tensor.to(moved.device)

        return self.map(move)

    def where(self, rows: Tensor, other: "LayerState") -> "LayerState":
        """This state in the rows that are True, elsewhere the other in this one's dtypes. rows: [B] bool"""
        tails = {}
        for name, mine in self.tails.items():
            theirs = other.tails[name]
            if name in GROWING:  # streams of different length
                mine, theirs = _same_length(mine, theirs)
            chosen = rows.reshape(-1, *[1] * (mine.dim() - 1))
            tails[name] = torch.where(chosen, mine, theirs.to(mine.dtype))
        memory = None
        if self.memory is not None and other.memory is not None:
            memory = self.memory.where(rows, other.memory)
        return LayerState(memory=memory, tails=tails)

    def leaves(self) -> dict[str, Tensor]:
        """Every tensor by a flat name, e.g. `memory.momentum.w0` or `tails.attention.k`."""
        memory = {} if self.memory is None else self.memory.leaves()
        return {f"memory.{n}": t for n, t in memory.items()} | {
            f"tails.{n}": t for n, t in self.tails.items()
        }

    @classmethod
    def from_leaves(cls, spec: MemorySpec | None, leaves: Mapping[str, Tensor]) -> "LayerState":
        """The inverse of `leaves`. spec: the rule of the memory, if there is one."""
        groups: dict[str, dict[str, Tensor]] = {"memory": {}, "tails": {}}
        for name, tensor in leaves.items():
            group, _, key = name.partition(".")
            if group not in groups:
                raise ValueError(f"state has a tensor {name!r}, wanted memory.* or tails.*")
            groups[group][key] = tensor
        memory = None
        if groups["memory"]:
            if spec is None:
                raise ValueError(
                    f"state has a memory ({sorted(groups['memory'])}), but the block has none"
                )
            memory = MemoryState.from_leaves(spec, groups["memory"])
        return cls(memory=memory, tails=groups["tails"])


def inside(name: str, tails: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tails of one module of a block: `attention.k` becomes `k`."""
    return {n.removeprefix(f"{name}."): t for n, t in tails.items() if n.startswith(f"{name}.")}


def outside(name: str, tails: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `inside`."""
    return {f"{name}.{n}": t for n, t in tails.items()}


def _same_length(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    length = max(mine.shape[1], theirs.shape[1])
    grown = [pad(t, (0, 0) * (t.dim() - 2) + (length - t.shape[1], 0)) for t in (mine, theirs)]
    return grown[0], grown[1]


pytree.register_pytree_node(
    LayerState,
    lambda state: ([state.memory, state.tails], None),
    lambda children, _: LayerState(**dict(zip(("memory", "tails"), children, strict=True))),
    serialized_type_name="atlas_lm.LayerState",
)
