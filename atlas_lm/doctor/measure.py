"""How far apart two computations are: values, final states and every gradient."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FLOOR = 1e-6  # tensors this much smaller than the largest of their kind are measured against the largest
FLOOR_FP32 = (
    1e-2  # the same for gradients in fp32: a cancelling sum has lost the digits that it cannot keep
)


def distance(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest relative error over the named tensors: max |got - truth| / max |truth|, per tensor.

    Kinds are told by what stands before the first dot of a name: `out.y`, `grad.w0`.
    """
    if got.keys() != truth.keys():
        raise ValueError(f"tensors are {sorted(got)}, wanted {sorted(truth)}")
    largest: dict[str, float] = {}
    for name, wanted in truth.items():
        if wanted.numel():
            size = wanted.detach().abs().max().item()
            largest[_kind(name)] = max(largest.get(_kind(name), 0.0), size)
    worst = 0.0
    for name, wanted in truth.items():
        have = got[name]
        if have.shape != wanted.shape:
            return float("inf")
        if not wanted.numel():
            continue
        difference = (have.detach() - wanted.detach()).abs().max().item()
        if math.isnan(difference):  # infinitely far, so that no maximum can lose it
            return float("inf")
        coarse = wanted.dtype == torch.float32 and _kind(name) == "grad"
        floor = (FLOOR_FP32 if coarse else FLOOR) * largest[_kind(name)]
        scale = max(wanted.detach().abs().max().item(), floor)
        worst = max(
            worst, 0.0 if difference == 0 else difference / scale if scale else float("inf")
        )
    return worst


def _kind(name: str) -> str:
    return name.partition(".")[0]


def leaves(tree: Any, prefix: str = "state") -> dict[str, Tensor]:
    """The floating-point tensors of any state, by place."""
    found, _ = pytree.tree_flatten(tree)
    tensors = [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]
    return {f"{prefix}.{i}": tensor for i, tensor in enumerate(tensors)}


def weighted_sum(tensors: Iterable[Tensor]) -> Tensor:
    """A fixed generic scalar of some tensors: no symmetry can hide an error behind it."""
    total: Tensor | float = 0.0
    for n, tensor in enumerate(tensors):
        phase = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        total = total + (tensor.flatten() * torch.cos(1.0 + n + 0.7 * phase)).sum()
    assert isinstance(total, Tensor)
    return total


def with_gradients(
    compute: Callable[[], Mapping[str, Tensor]], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs of a computation, and the gradient of their weighted sum in each wanted leaf."""
    outputs = compute()
    gradients = torch.autograd.grad(
        weighted_sum(outputs.values()), list(wanted.values()), materialize_grads=True
    )
    found = {f"out.{n}": t for n, t in outputs.items()}
    return found | {f"grad.{n}": g for n, g in zip(wanted, gradients, strict=True)}


def as_leaves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
