"""The state of a whole model as one value: a `LayerState` per block, and where each row stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from atlas_lm.layers.state import LayerState
from atlas_lm.memory.spec import MemorySpec


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """All that a model keeps of the streams it reads, one row each. Every change makes a new one."""

    layers: tuple[LayerState, ...]
    position: Tensor  # [B] int64, tokens read so far

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.leaves().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> "StreamState":
        """The same state with every tensor changed."""
        layers = tuple(layer.map(change) for layer in self.layers)
        return StreamState(layers=layers, position=change(self.position))

    def detach(self) -> "StreamState":
        """Cut the outer gradient: what was read before no longer receives any."""
        return self.map(Tensor.detach)

    def clone(self) -> "StreamState":
        return self.map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> "StreamState":
        """Move or cast like Tensor.to; positions stay int64."""
        layers = tuple(layer.to(*args, **kwargs) for layer in self.layers)
        moved = self.position.to(*args, **kwargs)
        return StreamState(layers=layers, position=self.position.to(moved.device))

    def rows(self, index: Tensor) -> "StreamState":
        """The given rows, in the given order, repeats allowed. index: [N] int64"""
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def where(self, rows: Tensor, other: "StreamState") -> "StreamState":
        """This state in the rows that are True, the other one elsewhere. rows: [B] bool"""
        pairs = zip(self.layers, other.layers, strict=True)
        layers = tuple(mine.where(rows, theirs) for mine, theirs in pairs)
        position = torch.where(rows, self.position, other.position)
        return StreamState(layers=layers, position=position)

    def leaves(self) -> dict[str, Tensor]:
        """Every tensor by a flat name, e.g. `layers.0.memory.momentum.w0`: what a file stores."""
        named = {
            f"layers.{i}.{name}": tensor
            for i, layer in enumerate(self.layers)
            for name, tensor in layer.leaves().items()
        }
        return named | {"position": self.position}

    @classmethod
    def from_leaves(
        cls, specs: list[MemorySpec | None], leaves: Mapping[str, Tensor]
    ) -> "StreamState":
        """The inverse of `leaves`. specs: of each block its rule, None for one without a memory."""
        layers: list[dict[str, Tensor]] = [{} for _ in specs]
        for name, tensor in leaves.items():
            if name == "position":
                continue
            head, _, rest = name.partition(".")
            index, _, key = rest.partition(".")
            if head != "layers" or not index.isdecimal() or int(index) >= len(specs):
                raise ValueError(
                    f"state has a tensor {name!r}, wanted position or layers.N.* with N below {len(specs)}"
                )
            layers[int(index)][key] = tensor
        if "position" not in leaves:
            raise ValueError("state has no tensor `position`; pass all that `leaves` gave")
        made = [LayerState.from_leaves(s, named) for s, named in zip(specs, layers, strict=True)]
        return cls(layers=tuple(made), position=leaves["position"])


pytree.register_pytree_node(
    StreamState,
    lambda state: ([state.layers, state.position], None),
    lambda children, _: StreamState(**dict(zip(("layers", "position"), children, strict=True))),
    serialized_type_name="atlas_lm.StreamState",
)
