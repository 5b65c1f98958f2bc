"""The outer optimizers, and which weights each of them moves."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.train.recipe import Optimizer

LIKE_ADAMW = 0.2  # size of an AdamW step per entry, in rates (Liu et al. 2025, arXiv 2502.16982)


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised, matrix by matrix (Jordan et al. 2024), sharded or not.

    torch's own Muon multiplies shards in bf16, and its results change with the number of processes; here a
    matrix is gathered first, so they do not, and the kernel of `newton_schulz` does the work.

        S <- momentum S + (1 - momentum) G;  W <- (1 - rate decay) W - rate 0.2 sqrt(max(O, I)) NS(G')
        with G' = (1 - momentum) G + momentum S
    """

    def __init__(
        self,
        weights: list[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        steps: int = 5,
        weight_decay: float = 0.0,
    ) -> None:
        wrong = [list(weight.shape) for weight in weights if weight.dim() != 2]
        if wrong:
            raise ValueError(f"Muon moves matrices, got a weight of shape {wrong[0]}")
        defaults = {"lr": lr, "momentum": momentum, "steps": steps, "weight_decay": weight_decay}
        super().__init__(weights, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group)
        return loss

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[weight], cast(Tensor, weight.grad)
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(state["momentum"], group["momentum"])
        step = _like(weight, newton_schulz(_whole(ahead), group["steps"]))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(step, alpha=-group["lr"] * LIKE_ADAMW * math.sqrt(max(weight.shape)))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(weight: Tensor, whole: Tensor) -> Tensor:
    """The whole matrix, which every process has, laid out as the weight is."""
    if not isinstance(weight, DTensor):
        return whole
    mesh = weight.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=weight.placements)


def build_optimizers(module: nn.Module, options: Optimizer) -> list[torch.optim.Optimizer]:
    """One optimizer for each kind of weight, over the weights of a module, sharded or not."""
    matrices, others = split_weights(module)
    adamw: dict[str, Any] = {"lr": options.rate, "betas": options.betas, "eps": options.eps}
    adamw["fused" if others[0].is_cuda else "foreach"] = True
    if options.kind == "adamw":
        groups = [
            {"params": matrices, "weight_decay": options.decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adamw)]
    muon = Muon(
        matrices,
        lr=options.rate,
        momentum=options.momentum,
        steps=options.steps,
        weight_decay=options.decay,
    )
    return [muon, torch.optim.AdamW(others, weight_decay=0.0, **adamw)]


def split_weights(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of linear maps inside the model, and all other weights: embeddings and head, norms, biases
    of gates, convolutions, what a memory starts from."""
    matrices: dict[int, nn.Parameter] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith("lm_head"):
            matrices[id(part.weight)] = cast(nn.Parameter, part.weight)
    others = [weight for weight in module.parameters() if id(weight) not in matrices]
    return list(matrices.values()), others


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
