"""The state of a memory as one value: functions take one and return a new one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from atlas_lm.memory.spec import MemorySpec


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """All that a stream has left behind. Any cut of the stream continues from it exactly.

    Tensors are head-major, [B, H, ...], fp32 (fp64 for fp64 inputs).
    """

    spec: MemorySpec  # the rule it belongs to; no tensor
    memory: dict[str, Tensor]  # fast weights [B, H, O, I]; kept pairs [B, H, n, .]
    anchor: dict[str, Tensor]  # the memory at the last chunk border; empty for online rules
    momentum: dict[str, Tensor]  # S, shaped as the memory; empty for descent
    window: dict[str, Tensor]  # the last window.size - 1 pairs, oldest first: k, v, gates of pairs
    position: Tensor  # [B] int64, tokens written so far

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "MemoryState":
        """The same state with every tensor changed."""
        groups = {
            name: {key: change(value) for key, value in getattr(self, name).items()}
            for name in GROUPS
        }
        return replace(self, position=change(self.position), **groups)  # type: ignore[arg-type]

    def detach(self) -> "MemoryState":
        """Cut the outer gradient: what was read before no longer receives any."""
        return self.map(Tensor.detach)

    def clone(self) -> "MemoryState":
        return self.map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> "MemoryState":
        """Move or cast like Tensor.to; the position stays int64."""
        moved = self.map(lambda tensor: tensor.to(*args, **kwargs))
        return replace(moved, position=self.position.to(moved.position.device))

    def where(self, rows: Tensor, other: "MemoryState") -> "MemoryState":
        """This state in the rows that are True, the other one elsewhere. rows: [B] bool"""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            if self.spec.keeps_pairs and mine.dim() == 4:  # streams of different length
                slots = max(mine.shape[2], theirs.shape[2])
                mine, theirs = (pad(one, (0, 0, 0, slots - one.shape[2])) for one in (mine, theirs))
            return torch.where(rows.reshape(-1, *[1] * (mine.dim() - 1)), mine, theirs)

        return pytree.tree_map(choose, self, other)

    def leaves(self) -> dict[str, Tensor]:
        """Every tensor by a flat name, e.g. `momentum.w0`: what a file stores."""
        named = {f"{g}.{key}": value for g in GROUPS for key, value in getattr(self, g).items()}
        return named | {"position": self.position}

    @classmethod
    def from_leaves(cls, spec: MemorySpec, leaves: dict[str, Tensor]) -> "MemoryState":
        """The inverse of `leaves`. Refuses names that no state has."""
        if "position" not in leaves:
            raise ValueError(
                f"state has tensors {sorted(leaves)} and no position; pass all that `leaves` gave"
            )
        groups: dict[str, dict[str, Tensor]] = {name: {} for name in GROUPS}
        for name, tensor in leaves.items():
            group, _, key = name.partition(".")
            if name != "position" and group not in groups:
                raise ValueError(
                    f"state has a tensor {name!r}, wanted one of {', '.join(GROUPS)}.*"
                )
            if name != "position":
                groups[group][key] = tensor
        state = cls(spec=spec, position=leaves["position"], **groups)
        check_state(spec, state)
        return state


GROUPS = ("memory", "anchor", "momentum", "window")


def initial_state(
    spec: MemorySpec,
    weights: Mapping[str, Tensor],
    batch: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MemoryState:
    """The state before the first token: the learned initial memory, in every row of the batch.

    device: where the state lives; by default where the weights are.
    """
    device = device or next((w.device for w in weights.values()), "cpu")
    shapes = state_shapes(spec, batch)

    def zeros(group: str) -> dict[str, Tensor]:
        return {n: torch.zeros(s, dtype=dtype, device=device) for n, s in shapes[group].items()}

    def start(group: str) -> dict[str, Tensor]:
        """Copies: a weight that is changed in place must not reach into a state, nor memory and
        anchor into each other."""
        weight = initial_memory(spec, weights)
        rows = {n: weight[n].to(device, dtype).expand(shape) for n, shape in shapes[group].items()}
        return {n: row.clone(memory_format=torch.contiguous_format) for n, row in rows.items()}

    return MemoryState(
        spec=spec,
        memory=zeros("memory") if spec.keeps_pairs else start("memory"),
        anchor=start("anchor"),
        momentum=zeros("momentum"),
        window=zeros("window"),
        position=torch.zeros(batch, dtype=torch.int64, device=device),
    )


def state_shapes(spec: MemorySpec, batch: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every tensor of a state, by group and name; kept pairs start with none."""
    rows = (batch, spec.heads)
    memory = {name: (*rows, *shape) for name, shape in spec.fast_shapes.items()}
    if spec.keeps_pairs:
        normalise = getattr(spec.features, "normalise", False)
        width = spec.value_dim + int(normalise)  # one more column: the weight of the pair itself
        memory = {"keys": (*rows, 0, spec.key_dim), "coefficients": (*rows, 0, width)}
    pairs = spec.window.size - 1
    window: dict[str, tuple[int, ...]] = {"k": (*rows, pairs, spec.key_dim)}
    window |= {"v": (*rows, pairs, spec.value_dim)}
    window |= dict.fromkeys(spec.pair_gates, (*rows, pairs))
    return {
        "memory": dict(memory),
        "anchor": {} if spec.online else dict(memory),
        "momentum": dict(memory) if spec.optimizer.has_momentum else {},
        "window": window,
    }


def initial_memory(spec: MemorySpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The learned start M_0 by fast weight, [1, H, O, I]."""
    return {name: weights[f"memory.{name}"].unsqueeze(0) for name in spec.fast_shapes}


def check_state(spec: MemorySpec, state: MemoryState, batch: int | None = None) -> None:
    """Refuse a state of another spec, another batch or with tensors of the wrong shape."""
    difference = None if spec == state.spec else spec.difference(state.spec)
    if difference:
        raise ValueError(
            f"the state belongs to another spec: {difference} (this spec, the state's); "
            "pass the spec that the state was made with"
        )
    batch = state.batch if batch is None else batch
    shapes = state_shapes(spec, batch)
    wanted = {f"{group}.{n}": shape for group in GROUPS for n, shape in shapes[group].items()}
    wanted["position"] = (batch,)
    got = state.leaves()
    if got.keys() != wanted.keys():
        raise ValueError(
            f"the state has tensors {sorted(got)}, wanted {sorted(wanted)}; "
            "make it with initial_state or take the one that memorize returned"
        )
    for name, shape in wanted.items():
        have = tuple(got[name].shape)
        if spec.keeps_pairs and name.startswith("memory."):
            shape = (*shape[:2], have[2], shape[3]) if len(have) == 4 else shape  # grows
        if have != shape:
            raise ValueError(
                f"state tensor {name} has shape {list(have)}, wanted {list(shape)}; the batch must be "
                "the one that the state was made for, one row per sequence"
            )
    if state.position.dtype != torch.int64:
        raise ValueError(
            f"state position is {state.position.dtype}, wanted int64: streams are long"
        )


def _flatten(state: MemoryState) -> tuple[list[Any], MemorySpec]:
    return [getattr(state, name) for name in (*GROUPS, "position")], state.spec


def _unflatten(children: Any, spec: MemorySpec) -> MemoryState:
    return MemoryState(spec=spec, **dict(zip((*GROUPS, "position"), children, strict=True)))


pytree.register_pytree_node(
    MemoryState, _flatten, _unflatten, serialized_type_name="atlas_lm.MemoryState"
)
