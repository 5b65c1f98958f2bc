"""The memory as a function: prediction A(M; z), and the slope of each of its weight matrices.

`predict` never sees a weight matrix, only maps x -> W x, so the same lines read a dense memory and a
memory that moves from token to token. The slope of one pair in one weight is always of rank one,
`left right^T`; `slopes` returns the two factors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Maps = Mapping[str, Callable[[Tensor], Tensor]]
Weights = Mapping[str, Tensor]
Slopes = dict[str, tuple[Tensor, Tensor]]
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Tape:
    """What `slopes` needs to know of a prediction."""

    inputs: tuple[Tensor, ...]  # the input of each layer, [B, H, n, I]
    before: tuple[Tensor, ...]  # the pre-activations of each hidden layer
    core: Tensor  # output of the last layer, before skip and norm


@dataclass(frozen=True, kw_only=True)
class MLP:
    """skip(z) + W_{L-1} s(... s(W_0 z)); with `norm`, z + LN(W_{L-1} s(...)) as in TTT.

    skip is the identity where features and values have one width, else none. Fast weights are named
    w0, w1, ... from the input on (mathematics.md's W2 and W1, for two layers).
    """

    kind: ClassVar[str] = "mlp"
    depth: int = 2
    expansion: int = 4  # hidden width, in multiples of the value width
    activation: Literal["gelu", "silu"] = "gelu"
    skip: bool = True
    norm: bool = False

    def __post_init__(self) -> None:
        if self.depth < 1 or self.expansion < 1:
            raise ValueError(
                f"memory has depth {self.depth} and expansion {self.expansion}, wanted both 1 or more"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}, wanted one of {list(ACTIVATIONS)}"
            )

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, int]]:
        """[O, I] of each fast weight."""
        hidden = self.expansion * values
        sizes = [features, *[hidden] * (self.depth - 1), values]
        return {f"w{i}": (sizes[i + 1], sizes[i]) for i in range(self.depth)}

    def init(
        self, heads: int, features: int, values: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Initial fast weights [H, O, I], and the outer weights of the architecture itself.

        Features have unit length, so the first layer is scaled by its output: hidden activations have
        about unit length too, and with them the slope of the last layer. Others scale by their input.
        """
        fast = {}
        for name, (rows, columns) in self.shapes(features, values).items():
            first = self.depth > 1 and name in ("w0", "gate")
            deviation = self._first_deviation(rows) if first else 1 / math.sqrt(columns)
            fast[name] = deviation * torch.randn(heads, rows, columns, generator=generator)
        norm = {"norm_weight": torch.ones(heads, values), "norm_bias": torch.zeros(heads, values)}
        return fast, norm if self.norm else {}

    def _first_deviation(self, hidden: int) -> float:
        """Of the weights that read the features: s(a) is about a/2 near zero."""
        return 2 / math.sqrt(hidden)

    def predict(self, maps: Maps, x: Tensor, weights: Weights) -> tuple[Tensor, Tape]:
        """x: [B, H, n, F] -> prediction [B, H, n, V] and the tape for `slopes`."""
        activate = ACTIVATIONS[self.activation][0]
        inputs, before = [x], []
        for i in range(self.depth - 1):
            before.append(maps[f"w{i}"](inputs[-1]))
            inputs.append(activate(before[-1]))
        core = maps[f"w{self.depth - 1}"](inputs[-1])
        return self._finish(core, x, weights), Tape(tuple(inputs), tuple(before), core)

    def slopes(self, memory: Weights, tape: Tape, error: Tensor, weights: Weights) -> Slopes:
        """Factors of d l / d W for every pair, given error = d l / d prediction: [B, H, n, V].

        memory: the dense fast weights at which the tape was made
        """
        derivative = ACTIVATIONS[self.activation][1]
        left, slopes = self._through_norm(error, tape.core, weights), {}
        for i in reversed(range(self.depth)):
            slopes[f"w{i}"] = (left, tape.inputs[i])
            if i > 0:
                left = derivative(tape.before[i - 1]) * (left @ memory[f"w{i}"])
        return slopes

    def _finish(self, core: Tensor, x: Tensor, weights: Weights) -> Tensor:
        if self.norm:
            scale, bias = _per_head(weights)
            return x + _standardise(core)[0] * scale + bias
        return x + core if self.skip and x.shape[-1] == core.shape[-1] else core

    def _through_norm(self, error: Tensor, core: Tensor, weights: Weights) -> Tensor:
        """The error behind the layer norm: r (g - mean g - n mean(g n)), g = error * scale."""
        if not self.norm:
            return error
        normal, inverse = _standardise(core)
        g = error * _per_head(weights)[0]
        return inverse * (
            g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)
        )


@dataclass(frozen=True, kw_only=True)
class Matrix(MLP):
    """M z; with `norm`, z + LN(M z). Starts at zero."""

    kind: ClassVar[str] = "matrix"
    depth: int = 1
    skip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth != 1:
            raise ValueError(
                f"a matrix memory has depth 1, got {self.depth}; use mlp for more layers"
            )

    def init(
        self, heads: int, features: int, values: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        fast, outer = super().init(heads, features, values, generator)
        return {name: torch.zeros_like(weight) for name, weight in fast.items()}, outer


@dataclass(frozen=True, kw_only=True)
class GatedMLP(MLP):
    """skip(z) + W1 (s(W0 z) * Wg z): Atlas++, and LaCT's SwiGLU."""

    kind: ClassVar[str] = "gated_mlp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth != 2:
            raise ValueError(
                f"a gated memory has depth 2, got {self.depth}; use mlp for other depths"
            )

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, int]]:
        return super().shapes(features, values) | {"gate": (self.expansion * values, features)}

    def _first_deviation(self, hidden: int) -> float:
        """s(a) g is about a g / 2, a product of two."""
        return (4 / hidden) ** 0.25

    def predict(self, maps: Maps, x: Tensor, weights: Weights) -> tuple[Tensor, Tape]:
        a, g = maps["w0"](x), maps["gate"](x)
        hidden = ACTIVATIONS[self.activation][0](a) * g
        core = maps["w1"](hidden)
        return self._finish(core, x, weights), Tape((x, hidden), (a, g), core)

    def slopes(self, memory: Weights, tape: Tape, error: Tensor, weights: Weights) -> Slopes:
        activate, derivative = ACTIVATIONS[self.activation]
        (x, hidden), (a, g) = tape.inputs, tape.before
        left = self._through_norm(error, tape.core, weights)
        u = left @ memory["w1"]
        return {
            "w0": (u * g * derivative(a), x),
            "w1": (left, hidden),
            "gate": (u * activate(a), x),
        }


@dataclass(frozen=True, kw_only=True)
class KeptPairs:
    """sum_i w_i kappa(k_i, z): every key is kept, with a coefficient in value space.

    The dual of a matrix memory, for kernels without a finite image; its state grows with the stream.
    """

    kind: ClassVar[str] = "kept_pairs"
    norm: ClassVar[bool] = False

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, int]]:
        return {}

    def init(
        self, heads: int, features: int, values: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}


Architecture = Matrix | MLP | GatedMLP | KeptPairs


def dense(memory: Weights) -> Maps:
    """The maps of a memory whose weights are plain tensors [B, H, O, I]."""
    return {name: _Dense(weight) for name, weight in memory.items()}


@dataclass(frozen=True, eq=False)  # compared by identity: torch.compile hashes what it calls
class _Dense:
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def _gelu_derivative(a: Tensor) -> Tensor:
    density = torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(a / math.sqrt(2))) + a * density


def _silu_derivative(a: Tensor) -> Tensor:
    s = torch.sigmoid(a)
    return s * (1 + a * (1 - s))


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (gelu, _gelu_derivative),
    "silu": (silu, _silu_derivative),
}


def _standardise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zero mean, unit variance over the last axis; and the inverse deviation."""
    centred = x - x.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + NORM_EPS)
    return centred * inverse, inverse


def _per_head(weights: Weights) -> tuple[Tensor, Tensor]:
    """Scale and bias of the output norm, [H, 1, V]."""
    return (
        weights["architecture.norm_weight"].unsqueeze(1),
        weights["architecture.norm_bias"].unsqueeze(1),
    )
