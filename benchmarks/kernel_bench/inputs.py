"""Inputs as a layer would make them: unit keys and queries, gates in the range where models train."""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernel_bench.cases import Matrices, Tensors, Tokens


class Draw:
    """Numbers of one seed on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def unit(self, *shape: int) -> Tensor:
        return F.normalize(self.normal(*shape), dim=-1)

    def gate(self, *shape: int, shift: float = 0.0) -> Tensor:
        """In (0, 1)."""
        return torch.sigmoid(self.normal(*shape) + shift)

    def log_alpha(self, *shape: int) -> Tensor:
        """Retention of about 0.98 in log space."""
        return F.logsigmoid(self.normal(*shape) + 4)


def learned(**tensors: Tensor) -> Tensors:
    """All of them as leaves that collect gradients."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def pairs(draw: Draw, shape: Tokens, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """q, k [B, T, H, F], v [B, T, H, V]"""
    rows = (shape.batch, shape.tokens, shape.heads)
    q, k = draw.unit(*rows, shape.features), draw.unit(*rows, shape.features)
    return dict(q=q.to(dtype), k=k.to(dtype), v=draw.normal(*rows, shape.values).to(dtype))


def linear_inputs(shape: Tokens, device: torch.device, *, window: int, momentum: bool) -> Tensors:
    """Steps of the order 1 / chunk, as all pairs of a chunk push from the same anchor."""
    draw, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    state = (shape.batch, shape.heads, shape.values, shape.features)
    made = pairs(draw, shape) | dict(eta=draw.gate(*rows) / 64, log_alpha=draw.log_alpha(*rows))
    if momentum:
        made["theta"] = draw.gate(*rows, shift=2.2)
    if window > 1:
        made["gamma"] = draw.gate(*rows, window) / window
    if shape.states:
        made["memory"] = 0.1 * draw.normal(*state)
    if shape.states and momentum:
        made["momentum"] = 0.01 * draw.normal(*state)
    return learned(**made)


def delta_inputs(shape: Tokens, device: torch.device, *, window: int) -> Tensors:
    draw, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    made = pairs(draw, shape) | dict(eta=draw.gate(*rows), log_alpha=draw.log_alpha(*rows))
    if window > 1:
        made["gamma"] = draw.gate(*rows, window) / window
    if shape.states:
        made["memory"] = 0.1 * draw.normal(shape.batch, shape.heads, shape.values, shape.features)
    return learned(**made)


def mlp_inputs(
    shape: Tokens,
    device: torch.device,
    *,
    window: int = 1,
    momentum: bool = False,
    gated: bool = False,
    start: bool = False,
    period: int = 0,
) -> Tensors:
    """For `mlp_memory`, weights as memory.w0 and so on; steps and weights as new models have them.

    period: of Muon, 0 for none
    """
    draw, rows = Draw(device), (shape.batch, shape.tokens, shape.heads)
    moving = momentum or period > 0
    step = period / 640 if period else 1 / 640 if momentum else 1 / 64
    made = pairs(draw, shape)
    made |= dict(eta=step * draw.gate(*rows), log_alpha=draw.log_alpha(*rows))
    if moving:
        made["theta"] = draw.gate(*rows, shift=2.2)
    if window > 1:
        made["gamma"] = draw.gate(*rows, window) / window
    made |= two_layers(draw, "memory", (shape.batch, shape.heads), shape, gated)
    if shape.states and moving:
        pushed = two_layers(draw, "momentum", (shape.batch, shape.heads), shape, gated)
        made |= {name: 0.1 * w for name, w in pushed.items()}
    if start:
        made |= two_layers(draw, "start", (shape.heads,), shape, gated)
    return learned(**made)


def two_layers(draw: Draw, name: str, rows: tuple[int, ...], shape: Tokens, gated: bool) -> Tensors:
    """Weights in fp32; hidden units of a unit key have about unit length together."""
    f, d, v = shape.features, shape.hidden, shape.values
    first = (4 / d) ** 0.25 if gated else 2 / d**0.5
    made = {"w0": first * draw.normal(*rows, d, f), "w1": draw.normal(*rows, v, d) / d**0.5}
    if gated:
        made["gate"] = first * draw.normal(*rows, d, f)
    return {f"{name}.{n}": w for n, w in made.items()}


def matrix_inputs(shape: Matrices, device: torch.device, *, dtype: torch.dtype) -> Tensors:
    draw = Draw(device)
    return learned(matrix=draw.normal(shape.number, shape.rows, shape.columns).to(dtype))
