"""Producers of the gates that a memory reads: low-rank maps of the input, squashed into their range."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    logsigmoid,
    relu,
)  # softplus(x) = -logsigmoid(-x), with strides that compile

from atlas_lm.memory.defaults import gate_defaults
from atlas_lm.memory.spec import MemorySpec


@dataclass(frozen=True)
class Squash:
    """From a free number to a legal gate.

    bias: (start, margin) -> at which a zero input gives the wanted start.
    value: (input, bias, most, margin) -> gate; most: see `Gates.most`. Steps and decays below the margin are
    exactly none: a smooth gate never closes, and what is a thousandth per token is all over a million.
    """

    bias: Callable[[float, float], float]
    value: Callable[[Tensor, Tensor, float, float], Tensor]


def _softplus_inverse(y: float) -> float:
    return y + math.log(-math.expm1(-y))


def _logit(y: float) -> float:
    return math.log(y / (1 - y))


def _decay(z: Tensor, bias: Tensor, _: float, margin: float) -> Tensor:
    """log alpha <= 0, formed in log space: a closed gate loses nothing over millions of tokens."""
    free = logsigmoid(-(z + bias))
    return -relu(-free - margin) if margin else free


def _step(z: Tensor, bias: Tensor, most: float, margin: float) -> Tensor:
    """Smooth: a learned base step, by token between nothing and twice of it, so that no token can blow a
    memory up. With a margin the bias says instead how easily the gate opens, and the base stays as it is."""
    if not margin:
        return 2 * torch.sigmoid(z) * bias.exp()
    return most / (1 - margin) * relu(torch.sigmoid(z + bias) - margin)


def _step_bias(start: float, margin: float) -> float:
    return _logit((1 + margin) / 2) if margin else math.log(start)


MOST = 0.9999
SQUASH = {
    "log_alpha": Squash(lambda start, margin: _softplus_inverse(margin - start), _decay),
    "eta": Squash(_step_bias, _step),
    # below one: a momentum that never fades would grow without end
    "theta": Squash(
        lambda start, _: _logit(start / MOST), lambda z, bias, *_: MOST * torch.sigmoid(z + bias)
    ),
    # at most 1/c each, so that a window of c pairs never pushes harder than one pair
    "gamma": Squash(lambda *_: 3.0, lambda z, bias, most, _: torch.sigmoid(z + bias) * most),
    "delta": Squash(
        lambda start, _: _softplus_inverse(start), lambda z, bias, *_: -logsigmoid(-(z + bias))
    ),
}


class Gates(nn.Module):
    """One producer per gate that the spec declares: width -> rank -> heads (x offsets)."""

    def __init__(self, spec: MemorySpec, width: int, rank: int, margin: float = 0.0) -> None:
        super().__init__()
        self.spec, self.margin = spec, margin
        self.priced = False  # training asks how far eta is open, as a share of what it can be,
        self.opened: Tensor | None = None  # and finds it here after each call
        self.down = nn.ModuleDict()
        self.up = nn.ModuleDict()
        for name, gate in spec.gates.items():
            values = max(gate.offsets, 1)
            self.down[name] = nn.Linear(width, rank, bias=False)
            self.up[name] = nn.Linear(rank, spec.heads * values, bias=False)
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(spec.heads, values)))

    def starts(self) -> dict[str, float]:
        """The value that each bias begins at, by its name."""
        return {
            f"{name}_bias": SQUASH[name].bias(start, self.margin)
            for name, start in gate_defaults(self.spec).items()
        }

    def most(self, name: str) -> float:
        """What a gate is at most: 1/c for gamma, twice its start for an eta with a margin."""
        if name == "gamma":
            return 1 / self.spec.window.size
        return 2 * gate_defaults(self.spec)[name]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [B, T, D] -> gates [B, T, H(, offsets)], at least in fp32."""
        gates = {}
        for name, gate in self.spec.gates.items():
            values = max(gate.offsets, 1)
            z = self.up[name](self.down[name](x)).unflatten(-1, (self.spec.heads, values))
            precise = torch.promote_types(z.dtype, torch.float32)
            most, bias = self.most(name), getattr(self, f"{name}_bias").to(precise)
            made = SQUASH[name].value(z.to(precise), bias, most, self.margin)
            gates[name] = made if gate.offsets else made.squeeze(-1)
            if name == "eta" and self.priced and self.training:
                self.opened = made.mean() / most
        return gates
